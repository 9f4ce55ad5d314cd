"""A run as it may be read: its cells with their metrics and flags, and what the ledger says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchkit.protocol import Cell
from benchkit.record import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A flag as it stands in the ledger: `waived` is the reason it was waived for, None if it was not."""

    name: str
    blocking: bool
    detail: str
    waived: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCell:
    """One cell of a run: its raw, how many requests succeeded, what it measured and what is doubtful."""

    cell: Cell
    raw: str
    n: int
    n_ok: int
    flags: tuple[Doubt, ...]
    metrics: Mapping[str, float | None]

    def to_json(self) -> dict[str, Any]:
        """The cell in the shape that `run --json` and `show --json` promise."""
        return {
            **asdict(self.cell),
            "raw": self.raw,
            "n": self.n,
            "n_ok": self.n_ok,
            "flags": [asdict(flag) for flag in self.flags],
            "metrics": dict(self.metrics),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run, its state in the ledger (recorded, banked, quarantined, …) and its measured cells."""

    run: Run
    status: str
    labels: tuple[str, ...]
    cells: tuple[MeasuredCell, ...]

    def to_json(self) -> dict[str, Any]:
        """The run in the shape that `run --json` and `show --json` promise."""
        run = self.run
        return {
            "id": run.id,
            "session": run.session,
            "protocol": run.protocol,
            "protocol_hash": run.protocol_hash,
            "arm": run.arm,
            "arm_hash": run.arm_hash,
            "grid": run.grid,
            "cold_of": run.cold_of,
            "rep": run.rep,
            "boot_id": run.boot_id,
            "status": self.status,
            "labels": list(self.labels),
            "started_at": run.started_at,
            "ended_at": run.ended_at,
            "cells": [cell.to_json() for cell in self.cells],
        }
