"""`benchkit compare`: the ledger's banked reps of two arms, handed to the comparison and laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchkit.compare import ArmsComparison, compare_arms
from benchkit.errors import BadInput
from benchkit.ledger import Ledger, RunState
from benchkit.measured import MeasuredRun
from benchkit.protocol import parse_protocol
from benchkit.render.markdown import table_markdown
from benchkit.render.table import comparison_table
from benchkit.reps import USABLE, Grid, protocol_hash_named, select_reps
from benchkit.settings import read_text

DEMO_METRICS = ("output_tok_per_s", "ttft_s", "tpot_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison, ready for JSON or markdown."""

    comparison: ArmsComparison

    def to_json(self) -> dict[str, Any]:
        """The shape that `compare --json` promises."""
        return self.comparison.to_json()

    def markdown(self) -> str:
        """The table, without a line break at its end."""
        return table_markdown(comparison_table([self.comparison])).rstrip("\n")


def compared(
    ledger: Ledger,
    protocol: str,
    arms: Sequence[str],
    *,
    metrics: Sequence[str] = (),
    factor: str | None = None,
    session: str | None = None,
    since: str | None = None,
    all_: bool = False,
    unmatched: bool = False,
) -> Compared:
    """Arm B against arm A under one protocol.

    Raises:
        BadInput: not two arms, or an unknown protocol, metric, factor or moment.
        Finding: no banked reps, several arm hashes under one name, or arms that are not matched.
    """
    if len(arms) != 2:
        raise BadInput(f"--arm: expected two arms, A and B, found {len(arms)}")
    hash_ = protocol_hash_meant(ledger, protocol)
    runs = runs_of(ledger, hash_, arms)
    reps = select_reps(runs, hash_, *arms, session=session, since=since, all=all_)
    factors = None if factor is None else [f.strip() for f in factor.split(",") if f.strip()]
    [comparison] = compare_arms(*reps, metrics=metrics, factor=factors, unmatched=unmatched)
    return Compared(comparison=comparison)


def protocol_hash_meant(ledger: Ledger, protocol: str) -> str:
    """The protocol hash that a file, a name in the ledger or the beginning of a hash stands for.

    Raises:
        BadInput: no run has it.
        Finding: the name stands for several questions.
    """
    if protocol.endswith(".toml") or Path(protocol).is_file():
        return parse_protocol(read_text(Path(protocol)), protocol).hash
    return protocol_hash_named(map(unread, ledger.runs()), protocol)


def runs_of(ledger: Ledger, protocol_hash: str, arms: Sequence[str], grid: Grid = "warm") -> list[MeasuredRun]:
    """The runs of a protocol, those that may be shown with their cells, the others without: no raw is read in vain."""
    return [
        ledger.measured(state)
        if (state.run.arm in arms and state.run.grid == grid and state.status == USABLE[grid])
        else unread(state)
        for state in ledger.runs(protocol=protocol_hash)
    ]


def unread(state: RunState) -> MeasuredRun:
    """A run of which nothing but its header is needed."""
    return MeasuredRun(run=state.run, status=state.status, labels=tuple(state.labels), cells=())
