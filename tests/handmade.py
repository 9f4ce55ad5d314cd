"""MeasuredRuns made by hand: what a ledger would give, with the values that a test puts in."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchkit.canonical import sha256_hex
from benchkit.measured import Doubt, MeasuredCell, MeasuredRun
from benchkit.protocol import Cell, parse_protocol
from benchkit.record import CellRecord, Run

PROTOCOL = """
schema = 1
name = "decode"
[load]
concurrency = [1, 8]
[workload]
isl = [8192]
osl = [1024]
"""

A_T1 = (1512.4, 1498.7, 1505.1)
B_T1 = (1543.0, 1551.9, 1538.6)
B_T3 = (1509.6, 1503.2, 1516.8)
A_P1 = (1512.4, 1480.2, 1531.7, 1495.5, 1520.9)
B_P1 = (1528.1, 1494.0, 1549.9, 1508.3, 1539.2)

DAY = "2026-09-0"


def compare_section(**keys: str) -> str:
    """The protocol with a `[compare]` of these TOML values."""
    return PROTOCOL + "[compare]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())


def arm_text(name: str, *, title: str = "", facts: Mapping[str, str] | None = None, engine: str = "vllm") -> str:
    """An arm file; facts are TOML texts."""
    lines = [
        "schema = 1",
        f'name = "{name}"',
        f'title = "{title}"',
        'model = "m"',
        'endpoints = ["http://127.0.0.1:1/v1"]',
        f'engine = "{engine}"',
        "[facts]",
        *(f'{key} = "{value}"' for key, value in (facts or {}).items()),
    ]
    return "\n".join(lines)


def cell(concurrency: int = 1, isl: int = 8192) -> Cell:
    return Cell(isl=isl, osl=1024, kv=0, concurrency=concurrency)


def flag(name: str, detail: str = "", *, blocking: bool = False, waived: str | None = None) -> Doubt:
    return Doubt(name=name, blocking=blocking, detail=detail, waived=waived)


def rep(
    arm: str,
    metrics: Mapping[Cell, Mapping[str, float | None]],
    *,
    number: int = 0,
    session: str = "s-1",
    status: str = "banked",
    flags: Mapping[Cell, tuple[Doubt, ...]] | None = None,
    labels: tuple[str, ...] = (),
    started_at: str = "",
    **run: Any,
) -> MeasuredRun:
    """One run of an arm; `number` is its rep and its block, and sets its time."""
    at = started_at or f"{DAY}{session[-1]}T10:0{number}:00Z"
    text = run.get("protocol_text", PROTOCOL)
    run_id = run.pop("id", f"r-{session}-{arm}{number}")
    raws = {place: sha256_hex(f"{run_id} {place}") for place in metrics}
    fields: dict[str, Any] = {
        "id": run_id,
        "session": session,
        "protocol": "decode",
        "protocol_hash": parse_protocol(text).hash,
        "protocol_text": text,
        "arm": arm,
        "arm_hash": sha256_hex(arm),
        "arm_text": arm_text(arm),
        "grid": "warm",
        "cold_of": None,
        "rep": number,
        "block": number,
        "slot": number,
        "boot_id": None,
        "complete": True,
        "prompts_digest": sha256_hex("prompts"),
        "measurement": 1,
        "client_version": "0.1.0",
        "started_at": at,
        "ended_at": at,
        "command": "benchkit run decode",
        "host": {"cpu": "x"},
        "server": {"version": "1"},
        "note": "",
        "cells": tuple(CellRecord(cell=place, raw=raws[place], content="", n=8, n_ok=8, facts={}) for place in metrics),
    } | run
    return MeasuredRun(
        run=Run(**fields),
        status=status,
        labels=labels,
        cells=tuple(
            MeasuredCell(cell=place, raw=raws[place], n=8, n_ok=8, flags=(flags or {}).get(place, ()), metrics=values)
            for place, values in metrics.items()
        ),
    )


def reps(
    arm: str, values: Sequence[float | None], *, metric: str = "output_tok_per_s", at: Cell | None = None, **run: Any
) -> list[MeasuredRun]:
    """One run a value of one metric in one cell; the server's boots are known and all one unless told."""
    boots = run.pop("boots", None) or [f"boot-{arm}"] * len(values)
    place = at or cell()
    return [rep(arm, {place: {metric: value}}, number=i, boot_id=boots[i], **run) for i, value in enumerate(values)]


def grid_reps(arm: str, by_cell: Mapping[Cell, Mapping[str, Sequence[float | None]]], **run: Any) -> list[MeasuredRun]:
    """Runs of several cells and metrics: the i-th values make the i-th run."""
    count = max(len(values) for metrics in by_cell.values() for values in metrics.values())
    return [
        rep(
            arm,
            {place: {name: values[i] for name, values in metrics.items()} for place, metrics in by_cell.items()},
            number=i,
            **({"boot_id": f"boot-{arm}"} | run),
        )
        for i in range(count)
    ]
