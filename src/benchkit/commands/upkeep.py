"""`benchkit verify`, `ledger rebuild`, `ledger merge`: whether a ledger is whole, and how it is made so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchkit.commands.names import ledger_path, who
from benchkit.ledger import Ledger
from benchkit.ledger import verify as verified
from benchkit.load.host import now_utc


def verify(given: Path | None) -> dict[str, Any]:
    """Everything that can be checked, in the shape that `verify --json` promises."""
    found = verified(ledger_path(given))
    return {
        "ok": found.ok,
        "raws": found.raws,
        "entries": found.entries,
        "problems": [asdict(p) for p in found.problems],
        "notes": list(found.notes),
    }


def verify_text(found: Mapping[str, Any]) -> str:
    """The problems, the notes, and one line that sums up."""
    lines = [f"problem: {p['kind']}: {p['what']}" for p in found["problems"]]
    lines += [f"note: {note}" for note in found["notes"]]
    state = "ok" if found["ok"] else f"{len(found['problems'])} problems"
    return "\n".join([*lines, f"{state}: {found['raws']} raws, {found['entries']} entries"])


def rebuild(given: Path | None) -> dict[str, Any]:
    """The database made anew from entries and raws."""
    with Ledger.rebuild(ledger_path(given)) as ledger:
        return {"ledger": str(ledger.root), "entries": len(ledger.log()), "runs": len(ledger.runs())}


def merge(ledger: Ledger, *, why: str) -> dict[str, Any]:
    """One head out of several; `entry` is None where there was only one."""
    entry = ledger.merge_heads(at=now_utc(), who=who(), why=why)
    return {"entry": None if entry is None else entry.hash}
