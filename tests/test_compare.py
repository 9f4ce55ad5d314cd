"""Two arms' reps against worked examples: samples, differences, verdicts, and what is said beside them."""

import json
from pathlib import Path

import pytest

from benchkit.compare import ArmsComparison, CellComparison, cells_of, compare_arms, side_of
from benchkit.errors import BadInput, Finding
from benchkit.measured import MeasuredRun
from benchkit.reps import select_reps
from handmade import A_P1, A_T1, B_P1, B_T1, B_T3, cell, compare_section, flag, grid_reps, rep, reps

CASES = Path(__file__).parent / "data" / "cases"
PAIRED = compare_section(design='"paired"')


def compared(runs: list[MeasuredRun], **how: object) -> ArmsComparison:
    selected = select_reps(runs, runs[0].run.protocol_hash, "base", "new", all=True)
    (only,) = compare_arms(*selected, **how)
    return only


def only_cell(runs: list[MeasuredRun], **how: object) -> CellComparison:
    (found,) = compared(runs, **how).cells
    return found


def texts(found: CellComparison) -> list[str]:
    return [note.text for note in found.notes]


# Verdicts


def test_a_clear_difference_leads_by_welch_on_logs():
    found = only_cell(reps("base", A_T1) + reps("new", B_T1))

    d = found.difference
    assert d is not None and d.ci_pct is not None
    assert (3, 3, "welch-log", "leads") == (found.a.sample.n, found.b.sample.n, d.test, found.verdict)
    assert 2.597 == pytest.approx(d.delta_pct, abs=5e-4)
    assert (1.563, 3.643) == pytest.approx(d.ci_pct, abs=5e-4)
    assert (7.0269, 3.9943, 0.0021724) == pytest.approx((d.statistic, d.df, d.p), rel=2e-5)
    assert 0.0021724 == pytest.approx(found.p_adjusted, rel=2e-5)
    assert [] == texts(found)


def test_a_small_difference_is_parity_within_2_per_cent_and_unresolved_within_1():
    runs = reps("base", A_T1) + reps("new", B_T3)

    assert "parity" == only_cell(runs, margin_pct=2.0).verdict
    unresolved = only_cell(runs)
    assert "unresolved" == unresolved.verdict
    # The run's relative s is 0.45 %: 3.07 of it at three a side, and five a side bring 2.02 of it under 1 %.
    assert ["3 reps resolve 1.4 %; 5 would resolve 1 %"] == texts(unresolved)


def test_reps_in_declared_blocks_are_compared_in_pairs():
    runs = reps("base", A_P1, protocol_text=PAIRED) + reps("new", B_P1, protocol_text=PAIRED)

    found = only_cell(runs)

    d = found.difference
    assert d is not None and d.ci_pct is not None
    assert ("paired-log", "leads", 4) == (d.test, found.verdict, d.df)
    assert (1.043, 15.295, 1.0658e-4) == pytest.approx((d.delta_pct, d.statistic, d.p), rel=1e-3)
    assert (0.853, 1.234) == pytest.approx(d.ci_pct, abs=1e-3)


def test_the_same_reps_undeclared_are_unpaired_and_asking_for_pairs_afterwards_is_told():
    runs = reps("base", A_P1) + reps("new", B_P1)

    assert 0.28394 == pytest.approx(only_cell(runs).difference.p, rel=1e-4)
    late = compared(runs, design="paired")
    assert "paired-log" == late.cells[0].difference.test
    assert "compared paired as asked afterwards; declared before the runs: unpaired" in [n.text for n in late.notes]


def test_one_rep_is_unresolved_without_s_and_shows_how_like_cells_vary():
    found = only_cell(reps("base", A_T1) + reps("new", B_T1[:1]))

    assert found.b.sample is not None
    assert (None, "unresolved", None) == (found.b.sample.s, found.verdict, found.p_adjusted)
    # A's relative s, 0.4553 % on 2 df.
    assert ["one rep has no s, so nothing can be said of the difference; like cells vary by s = 0.46 % (2 df)"] == (
        texts(found)
    )


def test_lower_seconds_lead_and_lower_rates_trail():
    case = json.loads((CASES / "B43.json").read_text())
    spread = (0.99, 1.0, 1.01)
    runs = [
        run
        for arm, side in (("base", case["base"]), ("new", case["new"]))
        for run in grid_reps(
            arm,
            {
                cell(): {
                    "ttft_s": [side["ttft_ms"] / 1000 * x for x in spread],
                    "output_tok_per_s": [side["tok_s"] * x for x in spread],
                }
            },
        )
    ]

    ttft, rate = compared(runs, metrics=["ttft_s", "output_tok_per_s"]).cells

    assert (-20.0, "leads") == (pytest.approx(ttft.difference.delta_pct), ttft.verdict)
    assert (-20.0, "trails") == (pytest.approx(rate.difference.delta_pct), rate.verdict)


def test_a_missing_sample_is_left_out_with_its_pair_and_is_no_zero():
    case = json.loads((CASES / "B44.json").read_text())
    runs = [
        run
        for arm in ("base", "new")
        for run in reps(arm, list(case[arm].values()), metric="acceptance_rate", protocol_text=PAIRED)
    ]

    found = only_cell(runs, metrics=["acceptance_rate"])

    assert (2, 1.0, 0.5) == (found.a.sample.n, found.a.sample.mean, found.b.sample.mean)
    assert ("paired-difference", -0.5) == (found.difference.test, found.difference.delta_pct)
    assert "left out, only one arm has a value: block 2" in texts(found)
    assert ["no value in 1 of 3 reps"] == [note.text for note in found.a.notes]


def test_blocks_without_a_partner_anywhere_are_compared_unpaired_with_a_note():
    runs = reps("base", A_T1, protocol_text=PAIRED) + reps("new", B_T1, session="s-2", protocol_text=PAIRED)

    found = only_cell(runs)

    assert 7.0269 == pytest.approx(found.difference.statistic, rel=1e-5)
    assert ["declared paired, but no block has both arms: unpaired"] == texts(found)


def test_two_runs_of_an_arm_in_one_block_are_one_observation():
    runs = [
        *reps("base", (10.0, 20.0), protocol_text=PAIRED),
        rep("base", {cell(): {"output_tok_per_s": 12.0}}, number=0, id="again", boot_id="boot-base", slot=9,
            protocol_text=PAIRED),
        *reps("new", (11.0, 22.0), protocol_text=PAIRED),
    ]  # fmt: skip

    assert (11.0, 20.0) == only_cell(runs).a.sample.values


def test_an_arm_without_the_metric_has_no_verdict_and_no_numbers():
    runs = reps("base", A_T1) + reps("new", (None, None, float("nan")))

    found = only_cell(runs)

    assert (None, None, None) == (found.b.sample, found.difference, found.verdict)
    assert ["output_tok_per_s could not be measured here"] == [note.text for note in found.b.notes]
    assert {"n": 0, "mean": None, "s": None, "values": []}.items() <= found.to_json()["b"].items()


def test_a_cell_of_one_arm_only_stays_in_the_comparison():
    rates = {"output_tok_per_s": A_T1}
    runs = grid_reps("base", {cell(1): rates, cell(8): rates}) + grid_reps("new", {cell(1): rates})

    last = compared(runs).cells[-1]

    assert (8, None) == (last.cell.concurrency, last.verdict)
    assert ["this arm did not measure the cell"] == [note.text for note in last.b.notes]


def test_a_ratio_of_zeros_is_refused_in_words():
    found = only_cell(reps("base", A_T1) + reps("new", (0.0, 1.0, 1.0)))

    assert (None, "unresolved") == (found.difference, found.verdict)
    assert ["a ratio needs values above zero"] == texts(found)


def test_equal_values_on_both_sides_give_no_interval_and_no_parity():
    found = only_cell(reps("base", (5.0, 5.0)) + reps("new", (5.0, 5.0)))

    assert ("unresolved", None) == (found.verdict, found.difference.ci_pct)
    assert ["no spread at all: the difference has no interval"] == texts(found)


def test_a_metric_without_a_better_direction_never_leads():
    values = {"prompt_tokens": (100.0, 101.0, 102.0)}, {"prompt_tokens": (200.0, 201.0, 202.0)}
    runs = grid_reps("base", {cell(): values[0]}) + grid_reps("new", {cell(): values[1]})

    found = only_cell(runs, metrics=["prompt_tokens"])

    assert found.difference.p < 0.05
    assert found.verdict is None


# Families


def test_p_is_adjusted_over_the_cells_of_a_metric_and_over_all_arms():
    rates = {c: {"output_tok_per_s": A_T1} for c in (cell(1), cell(8))}
    faster = {cell(1): {"output_tok_per_s": B_T1}, cell(8): {"output_tok_per_s": B_T3}}
    runs = grid_reps("base", rates) + grid_reps("new", faster) + grid_reps("third", faster)
    selected = select_reps(runs, runs[0].run.protocol_hash, "base", "new", "third")

    (two,) = compare_arms(*selected[:2])
    assert (2 * 0.0021724, 0.46794) == pytest.approx([c.p_adjusted for c in two.cells], rel=2e-5)

    pair = compare_arms(*selected)
    for arm in pair:
        # 4 × .0021724 for the smallest, which its equal twin may not undercut; 2 × .46794 for the others.
        assert (4 * 0.0021724, 2 * 0.46794) == pytest.approx([c.p_adjusted for c in arm.cells], rel=2e-5)


def test_a_difference_that_only_stands_alone_is_unresolved_and_says_so():
    # t = 4.0 on 4 df: p = .0161 alone, above .05 among four.
    a, b = (98.0, 100.0, 102.0), (104.7, 106.7, 108.7)
    cells = [cell(c) for c in (1, 2, 4, 8)]
    flat = {"output_tok_per_s": a}
    runs = grid_reps("base", dict.fromkeys(cells, flat)) + grid_reps(
        "new", {cells[0]: {"output_tok_per_s": b}} | dict.fromkeys(cells[1:], flat)
    )

    first = compared(runs).cells[0]

    assert first.difference.p < 0.05 < first.p_adjusted == pytest.approx(4 * first.difference.p)
    assert "unresolved" == first.verdict
    assert "alone, 0.06" in texts(first)[0] and texts(first)[0].endswith("among 4 comparisons")


def test_a_filter_of_cells_makes_the_family_smaller():
    rates = {c: {"output_tok_per_s": A_T1} for c in (cell(1), cell(8))}
    faster = {c: {"output_tok_per_s": B_T1} for c in (cell(1), cell(8))}

    found = only_cell(grid_reps("base", rates) + grid_reps("new", faster), cells=[cell(1)])

    assert 0.0021724 == pytest.approx(found.p_adjusted, rel=2e-5)


# Boots


def test_with_two_boots_the_observation_is_the_mean_of_a_boot():
    runs = reps("base", A_T1) + reps("new", (1490.0, 1510.0, 1500.0, 1524.0), boots=["x", "x", "y", "y"])

    found = only_cell(runs)

    assert ((1500.0, 1512.0), "2 boots × 2") == (found.b.sample.values, found.b.n_text)
    assert (2, "2 boots × 2") == (found.to_json()["b"]["n"], found.to_json()["b"]["n_text"])
    assert texts(found)[0].startswith("3 and 2 observations resolve ")


def test_an_unknown_boot_leaves_the_reps_as_they_are():
    runs = reps("base", A_T1) + reps("new", B_T1, boots=["x", None, None])

    assert B_T1 == only_cell(runs).b.sample.values


def test_pairs_of_restarted_servers_are_averaged_within_their_boots():
    boots = ["x", "x", "y", "y"]
    runs = [
        *reps("base", (10.0, 12.0, 20.0, 22.0), boots=boots, protocol_text=PAIRED),
        *reps("new", (11.0, 13.0, 21.0, 23.0), boots=[b + "2" for b in boots], protocol_text=PAIRED),
    ]

    found = only_cell(runs)

    assert ((11.0, 21.0), (12.0, 22.0)) == (found.a.sample.values, found.b.sample.values)
    assert 1 == found.difference.df


# What was declared


def test_margin_and_primary_metric_are_those_stored_with_the_newest_run():
    text = compare_section(primary='"total_tok_per_s"', margin_pct="2.0")
    runs = reps("base", A_T1, metric="total_tok_per_s", protocol_text=text) + reps(
        "new", B_T3, metric="total_tok_per_s", protocol_text=text, session="s-2"
    )

    found = compared(runs)

    assert ("total_tok_per_s", 2.0, "parity") == (found.cells[0].metric, found.margin_pct, found.cells[0].verdict)


def test_a_margin_declared_otherwise_by_older_runs_is_told():
    runs = reps("base", A_T1) + reps("new", B_T3, protocol_text=compare_section(margin_pct="2.0"), session="s-2")

    found = compared(runs)

    assert 2.0 == found.margin_pct
    told = "margin 2 %, unpaired as the newest run declares; other runs declare margin 1 %, unpaired"
    assert told in [n.text for n in found.notes]


def test_a_margin_given_afterwards_is_used_with_a_note():
    told = compared(reps("base", A_T1) + reps("new", B_T3), margin_pct=2.0)

    assert "margin 2 % given afterwards; declared before the runs: 1 %" in [note.text for note in told.notes]
    assert () == compared(reps("base", A_T1) + reps("new", B_T3), margin_pct=1.0).notes


def test_an_unknown_metric_gets_the_nearest_known_name():
    with pytest.raises(BadInput, match=r"metric output_tok_s: not in the glossary; did you mean output_tok_per_s\?"):
        compared(reps("base", A_T1) + reps("new", B_T1), metrics=["output_tok_s"])


def test_cells_that_nobody_measured_are_a_finding():
    with pytest.raises(Finding, match="no cell to compare"):
        compared(reps("base", A_T1) + reps("new", B_T1), cells=[cell(99)])


def test_unmatched_arms_are_refused_or_shown_as_such():
    runs = reps("base", A_T1) + reps("new", B_T1, measurement=2)

    with pytest.raises(Finding, match="base and new are not matched: measurement number of the client"):
        compared(runs)
    shown = compared(runs, unmatched=True).to_json()
    assert (False, ["measurement number of the client: base 1; new 2"]) == (shown["matched"], shown["differs"])


# Flags


def test_flags_of_all_reps_are_counted_once_a_name_and_reason():
    flags = {cell(): (flag("errors", "1 of 24 failed", blocking=True, waived="known proxy"), flag("few_requests"))}
    runs = [*reps("base", A_T1), *reps("new", B_T1[:2], flags=flags), rep("new", {cell(): {}}, number=2)]

    side = only_cell(runs).b

    assert [("errors", "known proxy", 2), ("few_requests", None, 2)] == [(f.name, f.waived, f.reps) for f in side.flags]
    assert [
        "errors: 1 of 24 failed; waived: known proxy (in 2 of 3 reps)",
        "fewer than two requests a stream (in 2 of 3 reps)",
        "no value in 1 of 3 reps",
    ] == [note.text for note in side.notes]


@pytest.mark.parametrize(
    ("name", "metric", "marked"),
    [
        ("assumed_n1", "tpot_s_p99", True),
        ("assumed_n1", "output_tok_per_s", False),
        ("spread_tokens", "steady_output_tok_per_s", True),
        ("spread_tokens", "decode_tok_per_s", False),
        ("coalesced_events", "chunk_per_s", True),
        ("coalesced_events", "ttft_s", False),
    ],
)
def test_doubts_about_tokens_in_events_mark_the_metrics_they_touch(name, metric, marked):
    runs = reps("base", A_T1, metric=metric, flags={cell(): (flag(name),)})
    (selected,) = select_reps(runs, runs[0].run.protocol_hash, "base")

    side = side_of(selected, cells_of([selected])[0], metric)

    assert [name] == [f.name for f in side.flags]
    assert ([name] if marked else []) == [note.kind for note in side.notes]


# JSON


def test_json_has_the_promised_shape_and_holds_no_infinity():
    wild = reps("base", (1e-100, 1e100)) + reps("new", (1e-100, 1e100))

    shown = compared(wild).to_json()

    json.dumps(shown, allow_nan=False)
    assert [-100.0, None] == shown["cells"][0]["ci_pct"]
    assert {"protocol", "protocol_hash", "matched", "factor", "differs", "arms", "cells"} <= shown.keys()
    promised = "isl osl kv concurrency metric unit a b delta_pct ci_pct test statistic df p p_adjusted mde_pct verdict"
    assert set(promised.split()) <= shown["cells"][0].keys()
    assert {"n", "mean", "s", "values", "flags"} <= shown["cells"][0]["a"].keys()
    assert ["base", "new"] == shown["arms"]


def test_json_tells_the_doubts_of_each_arm():
    shown = compared(reps("base", A_T1) + reps("new", B_T1)).to_json()

    doubt = "all reps of this arm come from one server boot"
    assert [("base", doubt), ("new", doubt)] == [(note["arm"], note["text"]) for note in shown["footnotes"]]
