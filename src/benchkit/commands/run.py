"""`benchkit run`: plan, measure, record; every finished cell is on disk before the next one begins."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchkit.arm import parse_arm
from benchkit.commands.names import text_of, who
from benchkit.commands.progress import Progress
from benchkit.errors import BadInput, EndpointUnfit, Interrupted, InvalidRun
from benchkit.ledger import Journal, Ledger, unfinished
from benchkit.load.grid import Begun, run_session
from benchkit.load.host import now_utc
from benchkit.load.plan import Plan, ordered_steps
from benchkit.load.shapes import Flight
from benchkit.measured import MeasuredRun
from benchkit.metrics import cell_metrics, metric_named
from benchkit.protocol import Cell, Protocol, parse_protocol
from benchkit.record import CellRecord, RequestRecord, Run, new_id, raw_bytes


@dataclass(slots=True)
class _Kept:
    """The sink of a session: raws and the journal at once, the ledger's chain when a grid is complete."""

    ledger: Ledger
    journal: Journal
    protocol: Protocol
    progress: Progress
    runs: list[str] = field(default_factory=list)

    def served(self, protocol_hash: str, boot_id: str) -> bool:
        return self.ledger.served(protocol_hash, boot_id)

    def boot_seen(self, boot_id: str) -> bool:
        return self.ledger.boot_seen(boot_id)

    def run_started(self, run: Run) -> None:
        self.journal.start_run(run.to_json())

    def cell_started(self, run: Run, cell: Cell, n: int, flight: Flight) -> None:
        self.progress.cell_started(run, cell, n, flight)

    def cell_done(
        self, run: Run, index: int, cell: Cell, records: Sequence[RequestRecord], facts: Mapping[str, Any]
    ) -> CellRecord:
        sha, content, _ = self.ledger.write_raw(records, _about(run, cell))
        n_ok = sum(r.ok for r in records)
        kept = CellRecord(cell=cell, raw=sha, content=content, n=len(records), n_ok=n_ok, facts=facts)
        self.journal.add_cell(run.id, index, kept)
        metrics = cell_metrics(records, cell=cell, facts=facts, slo=self.protocol.slo)
        self.progress.cell_done(len(records), n_ok, metrics["output_tok_per_s"], metrics["ttft_s"])
        return kept

    def cell_interrupted(self, run: Run, index: int, cell: Cell, records: Sequence[RequestRecord]) -> None:
        self.progress.stop()
        if records:
            self.journal.keep_interrupted(run.id, index, raw_bytes(records, _about(run, cell)))

    def run_done(self, run: Run) -> None:
        self.ledger.record(run, at=now_utc(), who=who())
        self.journal.finish_run(run.id)
        self.runs.append(run.id)

    def planned(self, requests: int) -> None:
        self.progress.total += requests

    def say(self, text: str) -> None:
        self.progress.note(text)


def _about(run: Run, cell: Cell) -> dict[str, Any]:
    return {"run": run.id, "cell": str(cell), "protocol_hash": run.protocol_hash, "arm": run.arm}


def plan_session(
    protocol: str, arms: Sequence[str], runs: Sequence[Run], *, reps: int | None, seed: int, command: str, note: str
) -> Plan:
    """The plan of a new session, from the names or files given on the command line.

    Args:
        protocol: a file or a name.
        arms: files or names, at least one.
        runs: what the ledger knows, for names.
        reps: warm grids in place of the protocol's number.
        seed: of the interleaving.
        command: the command line, kept as a fact.
        note: the operator's words.

    Raises:
        BadInput: a file or name that cannot be used, or two arms of one name.
    """
    if not arms:
        raise BadInput("--arm: expected at least one arm, found none")
    protocol_text, where = text_of("protocol", protocol, runs)
    primary = parse_protocol(protocol_text, where).compare.primary
    if metric_named(primary) is None:
        raise BadInput(f"{where}: compare.primary: expected a metric of docs/metrics.md, found {primary}")
    texts = []
    for name in arms:
        text, arm_where = text_of("arm", name, runs)
        parse_arm(text, arm_where)
        texts.append(text)
    return new_plan(protocol_text, texts, reps=reps, seed=seed, command=command, note=note)


def new_plan(
    protocol_text: str, arm_texts: Sequence[str], *, reps: int | None, seed: int, command: str, note: str
) -> Plan:
    """The plan of a new session from the texts themselves.

    Raises:
        BadInput: a text that cannot be used, or two arms of one name.
    """
    grids = parse_protocol(protocol_text).grids
    names = [parse_arm(text).name for text in arm_texts]
    if len(set(names)) != len(names):
        raise BadInput(f"--arm: expected arms of different names, found {', '.join(names)}")
    created = now_utc()
    return Plan(
        session=new_id("ses", created),
        protocol_text=protocol_text,
        arm_texts=tuple(arm_texts),
        seed=seed,
        steps=ordered_steps(len(names), cold=grids.cold, warm=grids.warm if reps is None else reps, seed=seed),
        command=command,
        note=note,
        created_at=created,
    )


def describe(plan: Plan) -> dict[str, Any]:
    """What a plan will do, for `--dry-run`: grids, cells, requests, tokens."""
    protocol = parse_protocol(plan.protocol_text)
    cells = [
        {
            "isl": c.isl, "osl": c.osl, "kv": c.kv, "concurrency": c.concurrency,
            "requests": (n := protocol.load.requests_at(c.concurrency)),
            "prompt_tokens": n * c.isl,
            "output_tokens": n * c.osl,
        }
        for c in protocol.cells
    ]  # fmt: skip
    arms = [parse_arm(text).name for text in plan.arm_texts]
    return {
        "session": plan.session,
        "protocol": protocol.name,
        "protocol_hash": protocol.hash,
        "arms": arms,
        "grids": [{"arm": arms[s.arm], "grid": s.grid, "rep": s.rep} for s in plan.steps],
        "cells": cells,
        "requests": len(plan.steps) * sum(c["requests"] for c in cells),
        "prompt_tokens": len(plan.steps) * sum(c["prompt_tokens"] for c in cells),
        "output_tokens": len(plan.steps) * sum(c["output_tokens"] for c in cells),
    }


def run(ledger: Ledger, plan: Plan, *, quiet: bool) -> list[MeasuredRun]:
    """Measures a new session and returns its runs.

    Raises:
        Interrupted: stopped by the user; the message says how to go on.
        EndpointUnfit: an arm cannot be measured; nothing was recorded.
    """
    with Journal.create(ledger.root, plan.session, plan.to_json()) as journal:
        try:
            return _measure(ledger, journal, plan, quiet=quiet)
        except Interrupted:
            raise
        except BaseException:
            if not _has_measured(ledger, journal, plan):
                journal.finish()  # leave no trace
            raise


def resume(ledger: Ledger, session: str, *, quiet: bool) -> list[MeasuredRun]:
    """Completes a session that was interrupted; cells that were measured are not measured again.

    Raises:
        BadInput: no such session; the message lists those that can be resumed.
        Interrupted, EndpointUnfit: as for `run`.
    """
    known = ledger.runs(session=session)
    if known and session not in unfinished(ledger.root):
        return [ledger.measured(state) for state in known]
    with Journal.open(ledger.root, session) as journal:
        return _measure(ledger, journal, Plan.from_json(journal.plan), quiet=quiet)


def _measure(ledger: Ledger, journal: Journal, plan: Plan, *, quiet: bool) -> list[MeasuredRun]:
    protocol = parse_protocol(plan.protocol_text)
    recorded = [state.run for state in ledger.runs(session=plan.session)]
    begun = _begun(ledger, journal, recorded)
    done = frozenset((r.slot, r.grid) for r in recorded if r.complete)
    left = [s for s in plan.steps if (s.slot, s.grid) not in done]
    total = protocol.requests_per_grid * len(left) - sum(c.n for b in begun for c in b.cells.values())
    kept = _Kept(ledger, journal, protocol, Progress(total=total, quiet=quiet))
    for what in journal.passed_over:
        kept.say(f"not taken up: {what}")
    kept.runs += [r.id for r in recorded]
    try:
        asyncio.run(run_session(plan, kept, done=done, begun=begun))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Interrupted(f"interrupted; {_how_to_go_on(ledger, plan)}") from None
    except EndpointUnfit as error:
        if not _has_measured(ledger, journal, plan):
            raise
        raise EndpointUnfit(f"{error}; {_how_to_go_on(ledger, plan)}") from None
    finally:
        kept.progress.stop()
    journal.finish()
    return [ledger.measured(ledger.run(id_)) for id_ in kept.runs]


def _has_measured(ledger: Ledger, journal: Journal, plan: Plan) -> bool:
    """Whether the session has a finished cell, in the chain or on its way there."""
    return bool(ledger.runs(session=plan.session)) or any(cells for _, cells in journal.runs())


def _how_to_go_on(ledger: Ledger, plan: Plan) -> str:
    return f"what was measured is kept. Go on with: benchkit run --resume {plan.session} --ledger {ledger.root}"


def _begun(ledger: Ledger, journal: Journal, recorded: Sequence[Run]) -> list[Begun]:
    """Runs that were begun and are not in the chain; what a kill left behind after recording is cleared away."""
    in_chain = {r.id for r in recorded}
    begun = []
    for header, cells in journal.runs():
        run = Run.from_json(header)
        if run.id in in_chain:
            journal.finish_run(run.id)
        else:
            begun.append(Begun(run=run, cells=cells))
    return begun


def refuse_empty(runs: Sequence[MeasuredRun]) -> None:
    """Raises InvalidRun where a cell of a whole grid has not one success: recorded, and never citable."""
    empty = [(r, c) for r in runs for c in r.cells if r.run.complete and not c.n_ok]
    if empty:
        run, cell = empty[0]
        why = next((f.detail for f in cell.flags if f.name == "errors"), "")
        raise InvalidRun(
            f"{len(empty)} cells without one success, the first: {run.run.id} ({run.run.arm}) {cell.cell}: {why}; "
            "recorded, and never citable"
        )


def command_line() -> str:
    """The command line as typed, for the record."""
    return " ".join(["benchkit", *sys.argv[1:]])
