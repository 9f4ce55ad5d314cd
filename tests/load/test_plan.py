"""The order of a session's grids."""

from __future__ import annotations

from benchkit.load.plan import Plan, Step, ordered_steps


def order(steps: tuple[Step, ...], grid: str) -> str:
    return "".join("AB"[s.arm] for s in steps if s.grid == grid)


def test_cold_grids_come_first_and_warm_blocks_are_mirrored() -> None:
    steps = ordered_steps(2, cold=1, warm=4, seed=1)

    assert ["cold"] * 2 + ["warm"] * 8 == [s.grid for s in steps]
    warm = order(steps, "warm")
    assert warm[:2] == warm[2:4][::-1]
    assert warm[4:6] == warm[6:8][::-1]


def test_each_block_holds_one_rep_of_each_arm() -> None:
    steps = ordered_steps(3, cold=1, warm=3, seed=7)

    for block in range(1, 4):
        of_block = [s for s in steps if s.block == block]
        assert {0, 1, 2} == {s.arm for s in of_block}
        assert {block - 1} == {s.rep for s in of_block}


def test_the_first_order_is_drawn_from_the_seed() -> None:
    firsts = {order(ordered_steps(2, cold=0, warm=1, seed=seed), "warm") for seed in range(20)}

    assert {"AB", "BA"} == firsts
    assert ordered_steps(2, cold=1, warm=3, seed=5) == ordered_steps(2, cold=1, warm=3, seed=5)


def test_a_drift_that_is_linear_in_time_cancels_over_two_blocks() -> None:
    """Slots 0..3 as A B B A: the mean slot of both arms is 1.5."""
    warm = [s for s in ordered_steps(2, cold=0, warm=2, seed=3) if s.grid == "warm"]

    means = [sum(s.slot for s in warm if s.arm == arm) / 2 for arm in (0, 1)]
    assert [1.5, 1.5] == means


def test_a_plan_survives_its_json() -> None:
    plan = Plan(
        session="s", protocol_text="p", arm_texts=("a", "b"), seed=3, steps=ordered_steps(2, cold=1, warm=2, seed=3),
        command="benchkit run", note="", created_at="2026-01-01T00:00:00.000Z",
    )  # fmt: skip

    assert plan == Plan.from_json(plan.to_json())
