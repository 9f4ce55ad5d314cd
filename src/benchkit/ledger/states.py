"""What the entries say about each run: status, labels, waivers; a pure fold that stores nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchkit.ledger.database import recorded_run
from benchkit.ledger.entries import KINDS, Entry, Graph
from benchkit.protocol import Cell
from benchkit.record import Run
from benchkit.validity import Flag

Status = Literal["recorded", "banked", "superseded", "quarantined", "retracted"]

STATUSES: tuple[Status, ...] = ("recorded", "banked", "superseded", "quarantined", "retracted")
"""From the least restrictive to the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """A reason why a blocking flag does not keep a run from being banked."""

    flag: str
    cell: Cell | None  # None: every cell of the run
    why: str
    who: str
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run and what the ledger says about it."""

    run: Run
    entry: str  # hash of the entry that recorded it
    recorded_at: str
    status: Status
    why: str  # the reason given for the status; "" for recorded
    superseded_by: str | None
    labels: Mapping[str, str]  # label → why
    waivers: tuple[Waiver, ...]
    rules: int | None  # version of the rules it was banked under
    flags: tuple[tuple[Flag, ...], ...] | None  # as banked, one tuple a cell in the run's order

    def waived(self, flag: str, cell: Cell) -> str | None:
        """The newest reason for which a flag of a cell is waived; None where it is not."""
        reasons = [w.why for w in self.waivers if w.flag == flag and w.cell in (None, cell)]
        return reasons[-1] if reasons else None


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """All runs, in the order in which they were recorded, and what could not be understood."""

    runs: Mapping[str, RunState]
    faults: tuple[tuple[str, str], ...]  # (entry hash, why): entries that are whole and make no sense
    unknown: tuple[str, ...]  # hashes of entries of kinds that this version does not know


def touched(entry: Entry) -> tuple[str, ...]:
    """The ids of the runs that an entry speaks of."""
    payload = entry.payload
    if entry.kind == "recorded":
        run = payload.get("run")
        found = [run.get("id") if isinstance(run, dict) else None]
    elif entry.kind == "banked":
        found = [r.get("run") for r in _list(payload.get("runs")) if isinstance(r, dict)]
    else:
        found = [payload.get("run"), *_list(payload.get("runs"))]
    return tuple(f for f in found if isinstance(f, str))


def fold(graph: Graph) -> States:
    """What all entries together say.

    The last word on a run's status holds. Where branches were joined there may be several last words, each
    written without knowledge of the other: the most restrictive holds until a later entry decides.
    """
    stories: dict[str, _Story] = {}
    faults: list[tuple[str, str]] = []
    unknown = []
    for entry in graph.order:
        if entry.kind not in KINDS:
            unknown.append(entry.hash)
            continue
        try:
            _tell(stories, entry)
        except (KeyError, TypeError, AttributeError):
            faults.append((entry.hash, f"its payload is not that of a {entry.kind} entry"))
        except ValueError as error:
            faults.append((entry.hash, str(error)))
    return States(
        runs={id_: story.state(graph) for id_, story in stories.items()},
        faults=tuple(faults),
        unknown=tuple(unknown),
    )


@dataclass(slots=True, kw_only=True)
class _Story:
    """What has been said of one run so far."""

    run: Run
    entry: Entry
    words: list[Entry]  # on its status
    labels: dict[str, str] = field(default_factory=dict)
    waivers: list[Waiver] = field(default_factory=list)

    def state(self, graph: Graph) -> RunState:
        last = [w for w in self.words if not any(graph.leads_to(w.hash, v.hash) for v in self.words)]
        holds = max(last, key=lambda w: STATUSES.index(_status(w)))  # the first of equals: stable
        banked = [w for w in self.words if w.kind == "banked"]
        flags = _banked_flags(banked[-1], self.run) if banked else None
        return RunState(
            run=self.run,
            entry=self.entry.hash,
            recorded_at=self.entry.at,
            status=_status(holds),
            why=holds.payload.get("why", ""),
            superseded_by=holds.payload.get("by") if holds.kind == "superseded" else None,
            labels=dict(self.labels),
            waivers=tuple(self.waivers),
            rules=banked[-1].payload["rules"] if banked else None,
            flags=flags,
        )


def _tell(stories: dict[str, _Story], entry: Entry) -> None:
    """Adds one entry to the stories of the runs that it speaks of."""
    payload = entry.payload
    if entry.kind == "recorded":
        run, _ = recorded_run(entry)
        if run.id in stories:
            raise ValueError(f"run {run.id} is recorded already by {stories[run.id].entry.hash[:12]}…")
        stories[run.id] = _Story(run=run, entry=entry, words=[entry])
        return
    told = []
    for id_ in touched(entry):
        if id_ not in stories:
            raise ValueError(f"run {id_} is not recorded before it")
        told.append(stories[id_])
    if entry.kind == "banked":
        for story in told:
            _banked_flags(entry, story.run)  # refuses a payload that is not one, before anything is taken
        int(payload["rules"])
    for story in told:
        if entry.kind in STATUSES:
            story.words.append(entry)
        elif entry.kind == "labelled":
            story.labels |= dict.fromkeys(payload.get("add", ()), payload["why"])
            for label in payload.get("remove", ()):
                story.labels.pop(label, None)
        elif entry.kind == "waived":
            cell = None if payload["cell"] is None else Cell(**payload["cell"])
            story.waivers.append(
                Waiver(flag=payload["flag"], cell=cell, why=payload["why"], who=entry.who, at=entry.at)
            )


def _status(entry: Entry) -> Status:
    return next(s for s in STATUSES if s == entry.kind)


def _banked_flags(entry: Entry, run: Run) -> tuple[tuple[Flag, ...], ...]:
    """The flags that a banked entry gives to each cell of a run."""
    cells = next(r["cells"] for r in entry.payload["runs"] if r["run"] == run.id)
    if [Cell(**c["cell"]) for c in cells] != [c.cell for c in run.cells]:
        raise ValueError(f"its cells are not those of run {run.id}")
    return tuple(
        tuple(Flag(name=f["name"], blocking=f["blocking"], detail=f["detail"]) for f in c["flags"]) for c in cells
    )


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()
