"""The ledger: runs and raws go in, are banked, quarantined, waived; what it says of them comes out."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchkit.errors import BadInput, BenchkitError, Finding
from benchkit.ledger.chain import Chain, Payload
from benchkit.ledger.entries import Entry, Graph, new_entry
from benchkit.ledger.files import Layout, disk_errors
from benchkit.ledger.measure import Examined, cached, examine, keep
from benchkit.ledger.states import RunState, States, Status, touched
from benchkit.measured import Doubt, MeasuredCell, MeasuredRun
from benchkit.metrics import with_serialization_ratio
from benchkit.protocol import Cell, parse_protocol
from benchkit.record import (
    CellRecord,
    RequestRecord,
    Run,
    content_digest,
    pinned_bytes,
    raw_bytes,
    read_raw,
    write_pinned,
)
from benchkit.validity import NEVER_WAIVED, RULES


class Raw(NamedTuple):
    """A raw that was written."""

    sha256: str
    content: str  # digest of its rows
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Banked:
    """What `bank` did: one entry for all runs, or none where all were banked before."""

    entry: Entry | None
    banked: tuple[str, ...]  # run ids
    already: tuple[str, ...]


class Ledger:
    """One ledger: a folder of raws and entries, with a database that can be made anew from them.

    Attributes:
        chain: its entries.
        layout: where things lie.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.layout = chain.layout

    # --- open and close -------------------------------------------------------------------------------------

    @classmethod
    def open(cls, root: Path, create: bool = False) -> Ledger:
        """Opens the ledger in a folder, and puts right what a crash or a `git pull` left half done.

        Entries that lie in the folder and not in the database are taken in, those without a file are
        written again, a missing database is made from the entries. A folder that cannot be written opens
        for reading.

        Args:
            root: the ledger's folder.
            create: make a ledger where there is none.

        Raises:
            BadInput: no ledger there, or one of a newer benchkit.
            Finding: the database is damaged.
        """
        return cls(Chain.open(Layout(Path(root)), create=create))

    @classmethod
    def rebuild(cls, root: Path) -> Ledger:
        """Makes the database anew from the entries, and puts it in the place of the old one.

        What only the old database knew (an entry whose file a crash prevented) is taken from it as far as
        it can be read; an old database that cannot be read whole is kept beside the new one.

        Raises:
            BadInput: no ledger there, or it cannot be written.
        """
        return cls(Chain.rebuild(Layout(Path(root))))

    def close(self) -> None:
        """Lets go of what is held in memory."""
        self.chain.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def root(self) -> Path:
        """The ledger's folder."""
        return self.layout.root

    @property
    def writable(self) -> bool:
        """False for a ledger that can only be read."""
        return self.chain.writable

    @property
    def notes(self) -> tuple[str, ...]:
        """What was put right or passed over so far, for a human to read."""
        return tuple(self.chain.notes)

    # --- what the ledger says -------------------------------------------------------------------------------

    def runs(
        self,
        *,
        protocol: str | None = None,
        arm: str | None = None,
        session: str | None = None,
        status: Status | None = None,
        grid: str | None = None,
    ) -> list[RunState]:
        """The runs that match all that is given, in the order in which they were recorded, newest last.

        Args:
            protocol: a protocol's name or hash.
            arm: an arm's name or hash.
            session: a session's id.
            status: what the ledger says of the run.
            grid: cold or warm.
        """
        return [
            s
            for s in self.chain.states.runs.values()
            if protocol in (None, s.run.protocol, s.run.protocol_hash)
            and arm in (None, s.run.arm, s.run.arm_hash)
            and session in (None, s.run.session)
            and status in (None, s.status)
            and grid in (None, s.run.grid)
        ]

    def run(self, name: str) -> RunState:
        """The run of an id, or of its beginning or last part, where no other run shares it.

        Raises:
            BadInput: none or several; the message lists candidates.
        """
        runs = self.chain.states.runs
        if name in runs:
            return runs[name]
        # Tables print the last part of an id.
        found = [id_ for id_ in runs if name and (id_.startswith(name) or id_.rpartition("-")[2] == name)]
        if len(found) == 1:
            return runs[found[0]]
        if found:
            raise BadInput(f"run {name}: can mean {len(found)} runs: {_some(found)}")
        near = difflib.get_close_matches(name, list(runs), n=3, cutoff=0.4) or list(runs)[-3:]
        raise BadInput(f"run {name}: not in {self.root}" + (f"; there are {_some(near)}" if near else ""))

    def log(self, run: str | None = None) -> list[Entry]:
        """The entries that speak of a run (an id or the beginning of one), or all of them; oldest first."""
        id_ = None if run is None else self.run(run).run.id
        return [e for e in self.chain.graph.order if id_ is None or id_ in touched(e)]

    def heads(self) -> tuple[str, ...]:
        """The hashes of the newest entries: one, unless branches were joined by git and not yet merged."""
        return self.chain.graph.heads

    def served(self, protocol_hash: str, boot_id: str) -> bool:
        """Whether a boot has served a whole grid of this protocol; one that was cut short does not count."""
        return any(
            s.run.boot_id == boot_id and s.run.protocol_hash == protocol_hash and s.run.complete
            for s in self.chain.states.runs.values()
        )

    def boot_seen(self, boot_id: str) -> bool:
        """Whether any recorded run was measured on this boot."""
        return any(s.run.boot_id == boot_id for s in self.chain.states.runs.values())

    def records(self, cell: CellRecord, events: bool = True) -> tuple[RequestRecord, ...]:
        """The records of a cell, its raw's bytes matching their hash; without `events` they come faster.

        Raises:
            Finding: the raw is missing, or is not what was pinned.
        """
        return read_raw(self.layout.raw(cell.raw), sha256=cell.raw, events=events)

    def measured(self, state: RunState) -> MeasuredRun:
        """A run's cells with their metrics and flags; those of a banked run are the flags it was banked with.

        Raises:
            Finding: a raw is missing, or is not what was pinned.
        """
        examined = self._examined(state)
        metrics = with_serialization_ratio(
            [(c.cell, w.metrics) for c, w in zip(state.run.cells, examined, strict=True)]
        )
        cells = []
        for place, (record, what) in enumerate(zip(state.run.cells, examined, strict=True)):
            banked = state.status == "banked" and state.flags is not None
            flags = state.flags[place] if banked and state.flags is not None else what.flags
            cells.append(
                MeasuredCell(
                    cell=record.cell,
                    raw=record.raw,
                    n=record.n,
                    n_ok=record.n_ok,
                    flags=tuple(
                        Doubt(
                            name=f.name,
                            blocking=f.blocking,
                            detail=f.detail,
                            waived=state.waived(f.name, record.cell) if f.blocking else None,
                        )
                        for f in flags
                    ),
                    metrics=metrics[place],
                )
            )
        return MeasuredRun(run=state.run, status=state.status, labels=tuple(state.labels), cells=tuple(cells))

    # --- what goes in ---------------------------------------------------------------------------------------

    def write_raw(self, records: Sequence[RequestRecord], about: Mapping[str, Any]) -> Raw:
        """Writes the records of a cell as a raw: whole and durable under its name, or not at all.

        Args:
            records: all requests of the cell.
            about: what a reader of the file alone should know (run, cell).

        Raises:
            BenchkitError: the disk did not take it.
        """
        self.chain.must_be_writable()
        data = raw_bytes(records, about)
        with disk_errors("the raw was not written"):
            sha, _ = write_pinned(self.layout.raws, data, ".parquet")
        return Raw(sha, content_digest(records), len(data))

    def record(self, run: Run, *, at: str, who: str) -> Entry:
        """Adds a run whose raws are all written. The same run twice is one entry.

        Never refused for the ledger's own troubles, where there is any way to add it: a measurement is not
        lost because branches are not merged or an old row is damaged.

        Args:
            run: what was measured.
            at: now, UTC, ISO 8601 with Z.
            who: who records it.

        Raises:
            Finding: a raw is missing or changed, or another run has this id.
            BadInput: a value that JSON cannot carry.
        """
        sizes = {c.raw: len(pinned_bytes(self.layout.raw(c.raw), c.raw)) for c in run.cells}
        payload = {"bytes": sizes, "run": run.to_json()}
        new = new_entry(prev=(), kind="recorded", at=at, who=who, payload=payload)
        before: list[Entry] = []

        def build(graph: Graph, states: States) -> Payload | None:
            state = states.runs.get(run.id)
            if state is None:
                return payload
            before.append(self.chain.entry(state.entry))
            if before[0].payload != new.payload:
                raise Finding(f"run {run.id}: recorded already, with other values; nothing was changed")
            return None

        return self.chain.append("recorded", build, at=at, who=who) or before[0]

    def bank(self, run_ids: Sequence[str], *, why: str, at: str, who: str) -> Banked:
        """Accepts runs into the citable set, all or none, after every raw was hashed, read and judged.

        Args:
            run_ids: ids of runs, or beginnings of them.
            why: the reason, for the record.
            at: now, UTC, ISO 8601 with Z.
            who: who banks them.

        Raises:
            Finding: a blocking flag that is not waived, a cold, incomplete, quarantined, superseded or
                retracted run, a raw that is not what was recorded, results that were banked before. The
                message lists all of it.
        """
        _must_say_why(why)
        states = list({s.run.id: s for s in map(self.run, run_ids)}.values())
        already = tuple(s.run.id for s in states if s.status == "banked")
        wanted = [s for s in states if s.status != "banked"]
        judged: list[tuple[RunState, list[Examined]]] = []
        refusals: list[str] = []
        contents = {
            c.content: s.run.id
            for s in self.chain.states.runs.values()
            if s.status == "banked"
            for c in s.run.cells
            if c.n
        }
        for state in wanted:
            whole = self._examined_anew(state)
            judged.append((state, whole))
            refusals += _refusals(state, whole, contents)
            contents |= {c.content: state.run.id for c in state.run.cells if c.n}
        if refusals:
            raise Finding("\n".join(refusals))
        if not wanted:
            return Banked(entry=None, banked=(), already=already)

        def build(graph: Graph, now: States) -> Payload:
            for state, _ in judged:
                if now.runs[state.run.id] != state:
                    raise Finding(f"run {state.run.id}: changed in the ledger meanwhile; bank it again")
            runs = [{"cells": _cells_payload(s, whole), "run": s.run.id} for s, whole in judged]
            return {"rules": RULES, "runs": runs, "why": why}

        entry = self.chain.append("banked", build, at=at, who=who)
        return Banked(entry=entry, banked=tuple(s.run.id for s in wanted), already=already)

    def quarantine(self, run_ids: Sequence[str], *, why: str, at: str, who: str) -> Entry:
        """Takes runs out of the citable set for a reason.

        Raises:
            BadInput: an unknown run, or no reason.
            Finding: a run that is retracted, which is more.
        """
        _must_say_why(why)
        ids = list(dict.fromkeys(self.run(r).run.id for r in run_ids))

        def build(graph: Graph, states: States) -> Payload:
            for id_ in ids:
                if states.runs[id_].status == "retracted":
                    raise Finding(f"run {id_}: is retracted, which a quarantine would weaken")
            return {"runs": ids, "why": why}

        return _there(self.chain.append("quarantined", build, at=at, who=who))

    def waive(self, run_id: str, flag: str, *, why: str, at: str, who: str, cell: Cell | str | None = None) -> Entry:
        """Gives the reason why a blocking flag does not keep a run from being banked; tables print it.

        Args:
            run_id: an id, or the beginning of one.
            flag: the flag's name.
            why: the reason.
            at: now, UTC, ISO 8601 with Z.
            who: who waives it.
            cell: one cell, or its text as printed ("8192/1024 c8"); None for every cell of the run.

        Raises:
            BadInput: a flag that cannot be waived, does not block or is not there; an unknown cell.
        """
        _must_say_why(why)
        state = self.run(run_id)
        id_, cells = state.run.id, [c.cell for c in state.run.cells]
        if flag in NEVER_WAIVED:
            raise BadInput(f"{flag}: cannot be waived; such a run is shown, never cited")
        if cell is not None and str(cell) not in map(str, cells):
            raise BadInput(f'cell "{cell}": not in run {id_}; there are {_some([str(c) for c in cells])}')
        carried = [
            f
            for c, what in zip(cells, self._examined(state), strict=True)
            if cell is None or str(c) == str(cell)
            for f in what.flags
        ]
        where = f"run {id_}" + (f", cell {cell}" if cell is not None else "")
        if flag not in {f.name for f in carried}:
            names = sorted({f.name for f in carried if f.blocking})
            there = f"blocking there: {', '.join(names)}" if names else "nothing blocks it"
            raise BadInput(f"{where}: does not carry {flag}; {there}")
        if not any(f.blocking for f in carried if f.name == flag):
            raise BadInput(f"{where}: {flag} does not block; it is a footnote already")
        chosen = next((c for c in cells if cell is not None and str(c) == str(cell)), None)
        payload = {"cell": chosen and asdict(chosen), "flag": flag, "run": id_, "why": why}
        return _there(self.chain.append("waived", lambda graph, states: payload, at=at, who=who))

    def merge_heads(self, *, at: str, who: str, why: str = "") -> Entry | None:
        """Joins branches that git merged into one line again; None where there is nothing to join."""

        def build(graph: Graph, states: States) -> Payload | None:
            return {"why": why} if len(graph.heads) > 1 else None

        return self.chain.append("merge", build, at=at, who=who)

    # --- raws -----------------------------------------------------------------------------------------------

    def _examined(self, state: RunState) -> list[Examined]:
        """Metrics and flags of a run's cells, from the cache as far as it goes; every raw is hashed all the same."""
        protocol = None
        with self.chain.database.reading() as conn:
            known = cached(conn, state.entry)
        new = {}
        for place, cell in enumerate(state.run.cells):
            if place in known:
                pinned_bytes(self.layout.raw(cell.raw), cell.raw)  # no figure is printed of a raw that is not there
            else:
                protocol = protocol or parse_protocol(state.run.protocol_text, f"run {state.run.id}")
                new[place] = examine(protocol, state.run, cell, self.records(cell))
        if new and self.writable:
            # Only a cache: a full disk or a busy database costs time later, and no result now.
            with contextlib.suppress(BenchkitError), self.chain.database.writing() as conn:
                keep(conn, state.entry, new)
        return [known.get(place) or new[place] for place in range(len(state.run.cells))]

    def _examined_anew(self, state: RunState) -> list[Examined]:
        """Metrics and flags of a run's cells from the raws alone, each found to be what was recorded."""
        protocol = parse_protocol(state.run.protocol_text, f"run {state.run.id}")
        out = []
        for cell in state.run.cells:
            records = self.records(cell)
            for fault in record_faults(cell, records):
                raise Finding(f"run {state.run.id}, cell {cell.cell}: raw {cell.raw[:12]}…: {fault}")
            out.append(examine(protocol, state.run, cell, records))
        return out


def record_faults(cell: CellRecord, records: Sequence[RequestRecord]) -> list[str]:
    """What the ledger says of a raw and its records do not bear out."""
    found = {
        "content": content_digest(records),
        "n": len(records),
        "n_ok": sum(r.ok for r in records),
    }
    said = {"content": cell.content, "n": cell.n, "n_ok": cell.n_ok}
    return [f"{k}: the ledger says {said[k]}, its records {v}" for k, v in found.items() if v != said[k]]


# --- private ------------------------------------------------------------------------------------------------


def _refusals(state: RunState, whole: Sequence[Examined], contents: Mapping[str, str]) -> list[str]:
    """Every reason why a run may not be banked, a line each."""
    run, out = state.run, []
    where = f"run {run.id}"
    if state.status != "recorded":
        out.append(f"{where}: is {state.status} ({state.why}); not banked")
    if run.grid == "cold":
        out.append(f"{where}: is cold; cold runs are shown, never banked")
    if not run.complete:
        out.append(f"{where}: is incomplete: cells of its grid were never measured; measure it again")
    for cell, what in zip(run.cells, whole, strict=True):
        if cell.content in contents:
            out.append(f"{where}, cell {cell.cell}: the same results as those of run {contents[cell.content]}")
        for flag in what.flags:
            if not flag.blocking or flag.name in ("cold", "incomplete"):
                continue  # the two that were said once for the whole run
            if flag.name in NEVER_WAIVED:
                out.append(f"{where}, cell {cell.cell}: {flag.name}: {flag.detail}; cannot be waived")
            elif state.waived(flag.name, cell.cell) is None:
                out.append(
                    f"{where}, cell {cell.cell}: {flag.name}: {flag.detail}; measure it again, or "
                    f'`benchkit waive {run.id} {flag.name} --cell "{cell.cell}" --why …`'
                )
    return out


def _cells_payload(state: RunState, whole: Sequence[Examined]) -> list[Payload]:
    """The flags of a run's cells as a banked entry keeps them."""
    return [
        {
            "cell": asdict(record.cell),
            "flags": [
                {**asdict(f), "waived": state.waived(f.name, record.cell) if f.blocking else None} for f in what.flags
            ],
        }
        for record, what in zip(state.run.cells, whole, strict=True)
    ]


def _must_say_why(why: str) -> None:
    if not why.strip():
        raise BadInput("--why: expected a reason, found none")


def _there(entry: Entry | None) -> Entry:
    assert entry is not None  # `build` gave a payload
    return entry


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
