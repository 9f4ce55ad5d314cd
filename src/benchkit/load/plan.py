"""A session's plan: which grid is measured on which arm, in which order; pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One grid of the plan. `block` holds one rep of each arm; `slot` is its place in the whole order."""

    arm: int
    grid: str  # cold | warm
    rep: int
    block: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a session is, so that it can be taken up again after a crash: texts, order, seed."""

    session: str
    protocol_text: str
    arm_texts: tuple[str, ...]
    seed: int
    steps: tuple[Step, ...]
    command: str
    note: str
    created_at: str

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        out = asdict(self)
        out["arm_texts"], out["steps"] = list(out["arm_texts"]), list(out["steps"])
        return out

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote."""
        return Plan(
            **{
                **value,
                "arm_texts": tuple(value["arm_texts"]),
                "steps": tuple(Step(**step) for step in value["steps"]),
            }
        )


def ordered_steps(arms: int, *, cold: int, warm: int, seed: int) -> tuple[Step, ...]:
    """The cold grids, then the warm ones interleaved in mirrored blocks (A B B A …).

    A drift of the machine that is linear in time then cancels between arms. The first order of each pair of
    blocks is drawn from the seed.
    """
    rng = random.Random(seed)
    steps: list[Step] = []

    def add(order: Sequence[int], grid: str, rep: int, block: int) -> None:
        for arm in order:
            steps.append(Step(arm=arm, grid=grid, rep=rep, block=block, slot=len(steps)))

    for rep in range(cold):
        add(range(arms), "cold", rep, rep)
    order: list[int] = []
    for rep in range(warm):
        order = list(reversed(order)) if rep % 2 else rng.sample(range(arms), arms)
        add(order, "warm", rep, cold + rep)
    return tuple(steps)
