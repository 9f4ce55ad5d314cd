"""`benchkit bank`, `quarantine`, `waive`: what people decide about runs, each with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit.commands.names import who
from benchkit.errors import BadInput
from benchkit.ledger import Ledger
from benchkit.load.host import now_utc


def runs_meant(ledger: Ledger, names: Sequence[str]) -> list[str]:
    """Run ids for what was typed; a session (its id, or `latest`) means its complete warm runs.

    Raises:
        BadInput: no name, an unknown run, or a session without a complete warm run.
    """
    if not names:
        raise BadInput("expected at least one run or session, found none; `benchkit runs` lists them")
    out: list[str] = []
    for name in names:
        of_session = ledger.runs(session=session_meant(ledger, name))
        if not of_session:
            out.append(ledger.run(name).run.id)
            continue
        warm = [s.run.id for s in of_session if s.run.grid == "warm" and s.run.complete]
        if not warm:
            raise BadInput(f"session {name}: has no complete warm run")
        out += warm
    return list(dict.fromkeys(out))


def session_meant(ledger: Ledger, name: str) -> str:
    """A session's id as it was typed; `latest` is the session of the run that was recorded last."""
    runs = ledger.runs()
    return runs[-1].run.session if name == "latest" and runs else name


def bank(ledger: Ledger, names: Sequence[str], *, why: str) -> dict[str, Any]:
    """Banks runs, all or none; what was banked before is left as it is.

    Raises:
        Finding: something keeps them from being cited; all of it is listed.
    """
    done = ledger.bank(runs_meant(ledger, names), why=why, at=now_utc(), who=who())
    entry = None if done.entry is None else done.entry.hash
    return {"entry": entry, "banked": list(done.banked), "already_banked": list(done.already)}


def quarantine(ledger: Ledger, names: Sequence[str], *, why: str) -> dict[str, Any]:
    """Takes runs out of the citable set."""
    ids = runs_meant(ledger, names)
    entry = ledger.quarantine(ids, why=why, at=now_utc(), who=who())
    return {"entry": entry.hash, "quarantined": ids}


def waive(ledger: Ledger, name: str, flag: str, *, cell: str | None, why: str) -> dict[str, Any]:
    """Gives the reason why a flag does not keep a run from being banked."""
    run = ledger.run(name).run.id
    entry = ledger.waive(run, flag, why=why, cell=cell, at=now_utc(), who=who())
    return {"entry": entry.hash, "run": run, "flag": flag, "cell": cell, "why": why}
