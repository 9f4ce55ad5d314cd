"""`benchkit runs`, `show`, `log`, `protocols`: what there is, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchkit.commands.decide import session_meant
from benchkit.commands.names import shipped
from benchkit.errors import BadInput
from benchkit.ledger import STATUSES, Ledger, unfinished
from benchkit.measured import MeasuredRun
from benchkit.metrics import metric_named
from benchkit.protocol import parse_protocol
from benchkit.record import Run
from benchkit.render.markdown import grid
from benchkit.settings import read_text

SHOWN = (
    "output_tok_per_s", "total_tok_per_s", "req_per_s", "steady_output_tok_per_s", "decode_tok_per_s",
    "prefill_tok_per_s", "ttft_s", "ttft_s_p99", "tpot_s", "tpot_weighted_s", "e2e_s", "dispatch_s_p99",
    "chunk_per_s", "tokens_per_event", "acceptance_rate", "acceptance_length", "prefix_hit_rate", "goodput_req_per_s",
    "peak_running", "peak_waiting", "preemptions", "kv_peak",
)  # fmt: skip
"""What `show` prints of a cell; all metrics are in its JSON."""


def runs(
    ledger: Ledger, *, protocol: str | None, arm: str | None, session: str | None, status: str | None
) -> list[dict[str, Any]]:
    """The runs of the ledger that match, oldest first, without their cells' metrics.

    Raises:
        BadInput: a status that does not exist.
    """
    if status is not None and status not in STATUSES:
        raise BadInput(f"--status: expected one of {', '.join(STATUSES)}, found {status}")
    return [
        {
            "id": s.run.id,
            "session": s.run.session,
            "protocol": s.run.protocol,
            "protocol_hash": s.run.protocol_hash,
            "arm": s.run.arm,
            "arm_hash": s.run.arm_hash,
            "grid": s.run.grid,
            "rep": s.run.rep,
            "boot_id": s.run.boot_id,
            "status": s.status,
            "labels": list(s.labels),
            "complete": s.run.complete,
            "started_at": s.run.started_at,
            "cells": len(s.run.cells),
        }
        for s in ledger.runs(protocol=protocol, arm=arm, session=session)
        if status is None or s.status == status
    ]


def unfinished_sessions(ledger: Ledger) -> list[str]:
    """Sessions that `run --resume` can complete."""
    return list(unfinished(ledger.root))


def run_list_text(found: Sequence[Mapping[str, Any]]) -> str:
    """The runs as a table; a hint where there are none."""
    if not found:
        return "no runs; `benchkit run` makes some, `benchkit demo` shows how"
    head = ["run", "protocol", "arm", "grid", "rep", "status", "cells", "started (UTC)"]
    rows = [
        [
            r["id"], r["protocol"], r["arm"], r["grid"], str(r["rep"] + 1),
            r["status"] if r["complete"] else f"{r['status']}, incomplete", str(r["cells"]), r["started_at"][:19],
        ]
        for r in found
    ]  # fmt: skip
    return _table(head, rows)


def show(ledger: Ledger, name: str) -> list[MeasuredRun]:
    """The run of an id, or all runs of a session."""
    of_session = ledger.runs(session=session_meant(ledger, name))
    return [ledger.measured(s) for s in of_session or [ledger.run(name)]]


def runs_text(found: Sequence[MeasuredRun]) -> str:
    """One line a cell of each run: what `run` prints at its end."""
    head = ["run", "arm", "grid", "cell", "ok", "tok/s", "TTFT ms", "TPOT ms", "blocking flags"]
    rows = []
    for measured in found:
        for cell in measured.cells:
            m = cell.metrics
            rows.append(
                [
                    measured.run.id,
                    measured.run.arm,
                    measured.run.grid,
                    str(cell.cell),
                    f"{cell.n_ok}/{cell.n}",
                    _number(m.get("output_tok_per_s"), 1),
                    _number(m.get("ttft_s"), 1, 1e3),
                    _number(m.get("tpot_s"), 2, 1e3),
                    ", ".join(f.name for f in cell.flags if f.blocking and f.waived is None) or "—",
                ]
            )
    return _table(head, rows)


def show_text(measured: MeasuredRun) -> str:
    """A run as a page: who it is, then each cell with its metrics and flags."""
    run = measured.run
    lines = [
        f"run        {run.id}  ({measured.status}{'' if run.complete else ', incomplete'})",
        f"session    {run.session}",
        f"protocol   {run.protocol}  {run.protocol_hash[:12]}",
        f"arm        {run.arm}  {run.arm_hash[:12]}",
        f"grid       {_grid(run)}",
        f"boot       {run.boot_id or 'unknown'}",
        f"measured   {run.started_at} to {run.ended_at}, benchkit {run.client_version}, measurement {run.measurement}",
        f"server     {_pairs({'engine': run.server.get('engine'), **(run.server.get('told') or {})})}",
        f"host       {_pairs(run.host)}",
    ]
    if run.note:
        lines.append(f"note       {run.note}")
    for cell in measured.cells:
        lines += ["", f"{cell.cell}  ·  {cell.n_ok}/{cell.n} ok  ·  raw {cell.raw[:12]}"]
        shown = [(name, cell.metrics.get(name)) for name in SHOWN]
        lines += [f"  {name:<26}{_with_unit(name, value)}" for name, value in shown if value is not None]
        for flag in cell.flags:
            mark = "waived" if flag.waived is not None else "blocks" if flag.blocking else "note"
            reason = f"  (waived: {flag.waived})" if flag.waived is not None else ""
            lines.append(f"  {mark:<7}{flag.name}: {flag.detail}{reason}")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return grid(head, rows, ["left"] * len(head))


def _grid(run: Run) -> str:
    return f"cold (of {run.cold_of})" if run.grid == "cold" else f"warm, rep {run.rep + 1}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items() if v not in (None, [], ""))


def _number(value: float | None, decimals: int, scale: float = 1.0) -> str:
    return "—" if value is None else f"{value * scale:.{decimals}f}"


def _with_unit(name: str, value: float) -> str:
    metric = metric_named(name)
    unit = metric.unit if metric is not None else ""
    return f"{value * 1e3:.3f} ms" if unit == "s" else f"{value:.4g} {unit}".rstrip()


def log(ledger: Ledger, name: str | None) -> list[dict[str, Any]]:
    """The entries that touch a run, or all of them, oldest first."""
    return [
        {"hash": e.hash, "kind": e.kind, "at": e.at, "who": e.who, "prev": list(e.prev), "payload": dict(e.payload)}
        for e in ledger.log(name)
    ]


def log_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """One line an entry: when, who, what, to which runs, why."""
    return "\n".join(
        f"{e['at'][:19]}Z  {e['hash'][:12]}  {e['who']}  {e['kind']}  {_of(e)}" for e in entries
    ) or "no entries"  # fmt: skip


def _of(entry: Mapping[str, Any]) -> str:
    payload = entry["payload"]
    if entry["kind"] == "recorded":
        run = payload["run"]
        return f"{run['id']}  {run['protocol']} {run['arm']} {run['grid']}"
    many = payload.get("runs") or ()
    names = [r["run"] if isinstance(r, dict) else str(r) for r in many] or [str(payload.get("run", ""))]
    flag = f" {payload['flag']}" if "flag" in payload else ""
    why = f"  — {payload['why']}" if payload.get("why") else ""
    return f"{', '.join(names)}{flag}{why}"


def shipped_protocols() -> list[dict[str, Any]]:
    """The shipped protocols: name, title, notes, hash."""
    out = []
    for name, path in shipped("protocol").items():
        protocol = parse_protocol(read_text(path), str(path))
        about = {"name": name, "title": protocol.title, "notes": protocol.notes, "protocol_hash": protocol.hash}
        out.append({**about, "file": str(path)})
    return out


def protocols_text(found: Sequence[Mapping[str, Any]]) -> str:
    """The shipped protocols, a line each."""
    return _table(["protocol", "title"], [[p["name"], p["title"]] for p in found])


def plan_text(plan: Mapping[str, Any]) -> str:
    """What `run --dry-run` prints: cells, order, totals."""
    head = ["ISL", "OSL", "KV", "concurrency", "requests", "prompt tokens", "output tokens"]
    keys = ("isl", "osl", "kv", "concurrency", "requests", "prompt_tokens", "output_tokens")
    rows = [[str(c[k]) for k in keys] for c in plan["cells"]]
    order = " ".join(f"{g['arm']}:{g['grid']}" for g in plan["grids"])
    return (
        f"{plan['protocol']} {plan['protocol_hash'][:12]}, arms {', '.join(plan['arms'])}\n\n{_table(head, rows)}\n\n"
        f"{len(plan['grids'])} grids in this order: {order}\n"
        f"in all {plan['requests']} requests, {plan['prompt_tokens']} prompt and {plan['output_tokens']} output tokens"
    )
