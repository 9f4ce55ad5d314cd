"""The arithmetic of doubt against published figures, scipy.stats, and cases of what other tools got wrong."""

import json
import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from benchkit.stats import (
    Comparison,
    Sample,
    boot_means,
    compare_difference,
    compare_paired,
    compare_unpaired,
    equivalent,
    holm,
    mde_pct,
    percentile,
    pooled_relative_s,
    reps_needed,
    verdict,
    welch_df,
)

CASES = Path(__file__).parent / "data" / "cases"


def sample(*values: float) -> Sample:
    return Sample(values=values)


A3 = sample(1512.4, 1498.7, 1505.1)
B3 = sample(1543.0, 1551.9, 1538.6)
B3_LIKE_A = sample(1509.6, 1503.2, 1516.8)
A5 = sample(1512.4, 1498.7, 1505.1, 1509.8, 1501.3)
B5 = sample(1543.0, 1551.9, 1538.6, 1547.2, 1533.9)
B5_LIKE_A = sample(1509.6, 1503.2, 1516.8, 1500.4, 1508.0)

rates = st.lists(st.floats(min_value=0.01, max_value=1e6), min_size=2, max_size=10)


def ratio(pct: float) -> float:
    return 1 + pct / 100


# Samples


def test_s_divides_by_n_minus_1_and_is_unknown_for_a_single_run():
    case = json.loads((CASES / "B23.json").read_text())
    a, b = sample(*case["a"]), sample(*case["b"])

    assert (a.mean, a.s, a.n) == (100.0, 2.8284271247461903, 2)
    assert (b.mean, b.s, b.n) == (412.5, None, 1)
    assert b.log_s is None


def test_equal_values_have_an_s_of_exactly_zero():
    assert sample(0.1, 0.1, 0.1, 0.1, 0.1, 0.1).s == 0.0


def test_the_log_mean_is_the_log_of_the_geometric_mean():
    assert math.log(4) == pytest.approx(sample(2.0, 8.0).log_mean)


def test_a_sample_cannot_be_empty():
    with pytest.raises(ValueError, match="what was not measured has no sample"):
        Sample(values=())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sample_refuses_what_is_not_finite_and_says_where(value: float):
    with pytest.raises(ValueError, match="value 1 of the sample is"):
        sample(1.0, value)


# Unpaired


@pytest.mark.parametrize(
    ("a", "b", "want_ratio", "want_ci", "want_t", "want_p"),
    [
        (A3, B3, 1.02597, (1.01563, 1.03643), 7.0269, 0.0021724),
        (A5, B5, 1.02488, (1.01859, 1.03121), 9.2557, 1.8832e-5),
        (A3, B3_LIKE_A, 1.00297, (0.99272, 1.01332), 0.80115, 0.46794),
        (A5, B5_LIKE_A, 1.00142, (0.99559, 1.00728), 0.56162, 0.58991),
    ],
    ids=["T1", "T2", "T3", "T4"],
)
def test_welch_on_logs_gives_the_worked_examples(a, b, want_ratio, want_ci, want_t, want_p):
    got = compare_unpaired(a, b)

    assert "welch-log" == got.test
    assert want_ratio == pytest.approx(ratio(got.delta_pct), abs=5e-6)
    assert want_ci == pytest.approx([ratio(end) for end in got.ci_pct], abs=5e-6)
    assert want_t == pytest.approx(got.statistic, rel=1e-5)
    assert want_p == pytest.approx(got.p, rel=3e-5)
    assert (a.n, b.n) == (got.n_a, got.n_b)


def test_seven_t_on_four_df_is_only_three_sigma():
    got = compare_unpaired(A3, B3)

    assert pytest.approx(got.df, abs=5e-5) == 3.9943
    assert pytest.approx(got.sigma_equiv, abs=5e-3) == 3.07


def test_the_degrees_of_freedom_follow_satterthwaite():
    assert pytest.approx(compare_unpaired(A5, B5).df, abs=5e-5) == 7.7333
    assert pytest.approx(welch_df(2.0, 3, 2.0, 3)) == 4.0
    assert pytest.approx(welch_df(2.0, 3, 0.0, 9)) == 2.0
    # (1/3 + 9/3)² / ((1/3)²/2 + (9/3)²/2) = 100 / 41
    assert pytest.approx(welch_df(1.0, 3, 3.0, 3)) == 100 / 41


@given(rates, rates)
def test_welch_agrees_with_scipy(a_values, b_values):
    a, b = sample(*a_values), sample(*b_values)
    assume(max(a.log_s, b.log_s) > 1e-6)
    with warnings.catch_warnings():
        # One side of equal values: scipy warns of lost precision, ours is exact there.
        warnings.simplefilter("ignore", RuntimeWarning)
        want = scipy.stats.ttest_ind(numpy.log(b_values), numpy.log(a_values), equal_var=False)
    got = compare_unpaired(a, b)

    assert want.statistic == pytest.approx(got.statistic, rel=1e-6, abs=1e-8)
    assert want.df == pytest.approx(got.df, rel=1e-6)
    assert want.pvalue == pytest.approx(got.p, rel=1e-5)
    for confidence, interval in ((0.95, got.ci_pct), (0.90, got.ratio90_pct)):
        ends = want.confidence_interval(confidence)
        if max(map(abs, ends)) < 300:
            assert [100 * math.expm1(end) for end in ends] == pytest.approx(interval, rel=1e-4, abs=1e-4)


@given(rates, rates)
def test_swapping_a_and_b_flips_the_sign_of_the_log_ratio_and_nothing_else(a_values, b_values):
    there = compare_unpaired(sample(*a_values), sample(*b_values))
    back = compare_unpaired(sample(*b_values), sample(*a_values))

    assert pytest.approx(ratio(there.delta_pct) * ratio(back.delta_pct)) == 1.0
    assert there.p == pytest.approx(back.p)
    assert there.mde_pct == pytest.approx(back.mde_pct)
    assert (there.statistic is None) == (back.statistic is None)
    if there.statistic is not None:
        assert there.statistic == pytest.approx(-back.statistic)


@given(rates, rates, st.floats(min_value=0.001, max_value=1000))
def test_the_unit_of_the_values_does_not_matter_to_a_ratio(a_values, b_values, scale):
    a, b = sample(*a_values), sample(*b_values)
    assume(max(a.log_s, b.log_s) > 1e-6)
    own = compare_unpaired(a, b)
    scaled = compare_unpaired(sample(*(scale * v for v in a_values)), sample(*(scale * v for v in b_values)))

    assert own.delta_pct == pytest.approx(scaled.delta_pct, rel=1e-6, abs=1e-6)
    assert own.p == pytest.approx(scaled.p, rel=1e-4)


def test_a_single_run_has_a_delta_and_no_doubt_that_could_be_named():
    got = compare_unpaired(sample(100.0), B3)

    assert (
        Comparison(
            scale="ratio",
            delta_pct=got.delta_pct,
            ci_pct=None,
            ratio90_pct=None,
            test="none",
            statistic=None,
            df=None,
            p=None,
            sigma_equiv=None,
            mde_pct=None,
            n_a=1,
            n_b=3,
        )
        == got
    )
    assert 100 * (scipy.stats.gmean(B3.values) / 100 - 1) == pytest.approx(got.delta_pct)


@pytest.mark.parametrize("b", [(100.0, 100.0, 100.0), (103.0, 103.0, 103.0)])
def test_no_spread_on_either_side_gives_no_certainty(b):
    got = compare_unpaired(sample(100.0, 100.0, 100.0), sample(*b))

    assert b[0] - 100 == pytest.approx(got.delta_pct)
    assert (got.test, got.p, got.ci_pct, got.statistic) == ("none", None, None, None)
    assert verdict(got, got.p, 5.0, "higher") == "unresolved"


def test_a_spread_of_one_rounding_error_is_no_spread():
    assert compare_unpaired(sample(0.3, 0.1 + 0.2), sample(0.4, 0.4)).test == "none"


def test_no_spread_on_one_side_leaves_the_other_sides_df():
    assert pytest.approx(compare_unpaired(sample(100.0, 100.0), sample(101.0, 102.0, 103.0)).df) == 2.0


@pytest.mark.parametrize("compare", [compare_unpaired, compare_paired])
def test_a_ratio_of_zero_is_refused_and_the_way_out_named(compare):
    with pytest.raises(ValueError, match=r"value 1 of sample B is 0\.0: .*compared by their difference"):
        compare(sample(1.0, 1.0), sample(1.0, 0.0))


def test_a_p_too_small_for_a_float_is_not_zero():
    a = sample(*(1.0 + 1e-7 * (i % 2) for i in range(400)))
    b = sample(*(9.0 + 1e-7 * (i % 2) for i in range(400)))
    got = compare_unpaired(a, b)

    assert 0 < got.p < 1e-300
    assert 30 < got.sigma_equiv < 40


# Paired


P1_A = sample(1512.4, 1480.2, 1531.7, 1495.5, 1520.9)
P1_B = sample(1528.1, 1494.0, 1549.9, 1508.3, 1539.2)


def test_pairing_finds_what_the_drift_of_the_blocks_hides():
    paired, unpaired = compare_paired(P1_A, P1_B), compare_unpaired(P1_A, P1_B)

    assert "paired-log" == paired.test
    assert pytest.approx(ratio(paired.delta_pct), abs=5e-6) == 1.01043
    assert pytest.approx(paired.statistic, abs=5e-4) == 15.295
    assert 4 == paired.df
    assert pytest.approx(paired.p, rel=5e-5) == 1.0658e-4
    assert pytest.approx([ratio(end) for end in paired.ci_pct], abs=5e-6) == (1.00853, 1.01234)
    assert pytest.approx(unpaired.p, rel=2e-5) == 0.28394
    assert pytest.approx([ratio(end) for end in unpaired.ci_pct], abs=5e-6) == (0.98957, 1.03173)


def test_a_paired_p99_moves_where_the_unpaired_test_sees_nothing():
    a, b = sample(412, 431, 405, 420, 440), sample(398, 420, 399, 401, 431)
    paired = compare_paired(a, b)

    assert pytest.approx(ratio(paired.delta_pct), abs=5e-6) == 0.97194
    assert pytest.approx(paired.statistic, abs=5e-5) == -5.1703
    assert pytest.approx(paired.p, rel=1e-5) == 0.0066507
    assert pytest.approx([ratio(end) for end in paired.ci_pct], abs=5e-6) == (0.95720, 0.98691)
    assert pytest.approx(compare_unpaired(a, b).p, abs=5e-4) == 0.231


@given(st.lists(st.tuples(st.floats(0.01, 1e6), st.floats(0.01, 1e6)), min_size=2, max_size=10))
def test_the_paired_test_agrees_with_scipy(pairs):
    a, b = zip(*pairs, strict=True)
    differences = numpy.log(b) - numpy.log(a)
    assume(numpy.std(differences) > 1e-6)
    want = scipy.stats.ttest_rel(numpy.log(b), numpy.log(a))
    got = compare_paired(sample(*a), sample(*b))

    assert want.statistic == pytest.approx(got.statistic, rel=1e-6, abs=1e-8)
    assert want.df == got.df
    assert want.pvalue == pytest.approx(got.p, rel=1e-5)


def test_a_constant_ratio_in_every_pair_is_rounding_and_no_noise():
    assert compare_paired(P1_A, sample(*(1.1 * value for value in P1_A.values))).test == "none"


def test_pairs_need_both_sides():
    with pytest.raises(ValueError, match="3 values in A and 5 in B"):
        compare_paired(A3, B5)


# Differences


def test_a_missing_value_is_left_out_of_both_sides_and_never_read_as_zero():
    case = json.loads((CASES / "B44.json").read_text())
    kept = [key for key, value in case["base"].items() if value is not None and case["new"][key] is not None]
    base, new = (sample(*(case[side][key] for key in kept)) for side in ("base", "new"))
    got = compare_difference(base, new, paired=True)

    assert kept == ["q1", "q2"]
    assert (base.mean, new.mean) == (1.0, 0.5)
    assert -0.5 == got.delta_pct
    assert 2 == got.n_a == got.n_b
    assert "paired-difference" == got.test


def test_shares_are_compared_by_welch_on_the_values_themselves():
    a, b = (0.00, 0.02, 0.01, 0.00), (0.03, 0.05, 0.02, 0.04)
    want = scipy.stats.ttest_ind(b, a, equal_var=False)
    got = compare_difference(sample(*a), sample(*b))

    assert "difference" == got.test
    assert 0.0275 == pytest.approx(got.delta_pct)
    assert (want.statistic, want.df, want.pvalue) == pytest.approx((got.statistic, got.df, got.p))
    assert tuple(want.confidence_interval(0.95)) == pytest.approx(got.ci_pct)


def test_the_margin_of_a_share_is_in_percentage_points():
    close = compare_difference(sample(0.801, 0.800, 0.799), sample(0.806, 0.805, 0.804))

    assert equivalent(close, 1.0)
    assert not equivalent(close, 0.5)


# Verdicts


@pytest.mark.parametrize(
    ("b", "margin_pct", "equal"),
    [(B3_LIKE_A, 1.0, False), (B3_LIKE_A, 2.0, True), (B3_LIKE_A, 3.0, True)],
)
def test_three_runs_show_equality_within_two_per_cent_and_not_within_one(b, margin_pct, equal):
    assert equal == equivalent(compare_unpaired(A3, b), margin_pct)


def test_five_runs_show_equality_within_one_per_cent():
    assert equivalent(compare_unpaired(A5, B5_LIKE_A), 1.0)


@pytest.mark.parametrize(("margin_pct", "want_p"), [(1.0, 0.0659), (2.0, 0.00520), (3.0, 0.00099)])
def test_equivalence_holds_at_the_level_of_the_larger_one_sided_p(margin_pct, want_p):
    got = compare_unpaired(A3, B3_LIKE_A)
    d = math.log1p(got.delta_pct / 100)
    standard_error = d / got.statistic
    margins = (d - math.log1p(-margin_pct / 100), math.log1p(margin_pct / 100) - d)
    p = max(scipy.stats.t.sf(margin / standard_error, got.df) for margin in margins)

    assert want_p == pytest.approx(p, abs=6e-5 if want_p > 0.01 else 6e-6)
    assert (p < 0.05) == equivalent(got, margin_pct)


@pytest.mark.parametrize(
    ("b", "want_ratio", "want90"),
    [
        ((1509.6, 1503.2, 1516.8), 1.00297, (0.99509, 1.01091)),
        ((1468.0, 1475.9, 1462.2), 0.97562, (0.96781, 0.98350)),
        ((1480.1, 1502.7, 1466.0), 0.98503, (0.96600, 1.00444)),
        ((1440.0, 1451.2, 1436.7), 0.95830, (0.95008, 0.96660)),
    ],
)
def test_the_ninety_per_cent_interval_is_the_gates(b, want_ratio, want90):
    got = compare_unpaired(A3, sample(*b))

    assert want_ratio == pytest.approx(ratio(got.delta_pct), abs=5e-6)
    assert want90 == pytest.approx([ratio(end) for end in got.ratio90_pct], abs=6e-6)


@pytest.mark.parametrize(
    ("a", "b", "margin_pct", "better", "want"),
    [
        (A3, B3, 1.0, "higher", "leads"),
        (A3, B3, 1.0, "lower", "trails"),
        (B3, A3, 1.0, "higher", "trails"),
        (B3, A3, 1.0, "lower", "leads"),
        (A3, B3_LIKE_A, 2.0, "higher", "parity"),
        (A3, B3_LIKE_A, 1.0, "higher", "unresolved"),
        (A3, B3, 4.0, "higher", "parity"),  # p = 0.002, and yet wholly inside the margin
        (A3, sample(1600.0), 1.0, "higher", "unresolved"),
    ],
)
def test_the_verdict_is_parity_first_then_leads_or_trails(a, b, margin_pct, better, want):
    got = compare_unpaired(a, b)

    assert want == verdict(got, got.p, margin_pct, better)


def test_the_adjusted_p_decides_and_not_the_cells_own():
    got = compare_unpaired(A3, B3)

    assert got.p < 0.05
    assert verdict(got, 0.0500001, 1.0, "higher") == "unresolved"
    assert verdict(got, 0.0499999, 1.0, "higher") == "leads"


def test_a_latency_that_fell_and_a_rate_that_fell_have_one_delta_and_two_verdicts():
    case = json.loads((CASES / "B43.json").read_text())
    verdicts = {}
    for metric, better in (("ttft_ms", "lower"), ("tok_s", "higher")):
        a, b = (sample(*(case[side][metric] * f for f in (0.999, 1.0, 1.001))) for side in ("base", "new"))
        got = compare_unpaired(a, b)
        assert -20.0 == pytest.approx(got.delta_pct)
        verdicts[metric] = verdict(got, got.p, 1.0, better)

    assert verdicts == {"ttft_ms": "leads", "tok_s": "trails"}


# Families


def test_holm_steps_down_through_the_worked_family():
    got = holm([0.001, 0.008, 0.039, 0.041, 0.27, 0.6])

    assert pytest.approx(got) == (0.006, 0.04, 0.156, 0.156, 0.54, 0.6)


def test_holm_keeps_the_order_and_leaves_untested_cells_out_of_the_family():
    assert pytest.approx(holm([None, 0.04, 0.015, None])) == (None, 0.04, 0.03, None)
    assert holm([0.9, 0.6]) == (1.0, 1.0)
    assert holm([]) == ()


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_never_lowers_a_p_and_never_reorders(ps):
    got = holm(ps)

    assert all(p <= q <= 1 for p, q in zip(ps, got, strict=True))
    assert sorted(got) == [q for _, q in sorted(zip(ps, got, strict=True))]


# What could be seen


@pytest.mark.parametrize(
    ("n", "want"),
    [
        (2, 5.653),
        (3, 3.071),
        (4, 2.381),
        (5, 2.024),
        (6, 1.796),
        (8, 1.507),
        (10, 1.325),
        (15, 1.060),
        (20, 0.909),
    ],
)
def test_the_detectable_difference_in_units_of_s(n, want):
    assert want == pytest.approx(mde_pct(0.01, n, n), abs=6e-4)


@pytest.mark.parametrize(("n", "want"), [(3, 3.264), (5, 1.682), (10, 0.996)])
def test_the_detectable_difference_of_pairs_in_units_of_their_s(n, want):
    a = Sample(values=tuple(100 * math.exp(0.001 * i) for i in range(n)))
    b = Sample(values=tuple(100 * math.exp(0.003 * i) for i in range(n)))
    s_of_differences = numpy.std([0.002 * i for i in range(n)], ddof=1)

    assert want == pytest.approx(compare_paired(a, b).mde_pct / 100 / s_of_differences, abs=6e-4)


def test_the_comparison_detects_what_the_plan_said_when_both_sides_vary_alike():
    a = Sample(values=tuple(math.exp(x) for x in (4.99, 5.00, 5.01)))
    b = Sample(values=tuple(math.exp(x) for x in (6.99, 7.00, 7.01)))

    assert mde_pct(0.01, 3, 3) == pytest.approx(compare_unpaired(a, b).mde_pct)


def test_unequal_sides_count_through_their_standard_error():
    want = 100 * 0.01 * math.sqrt(1 / 3 + 1 / 12)
    noncentrality = mde_pct(0.01, 3, 12) / want
    critical = scipy.stats.t.ppf(0.975, 13)

    assert pytest.approx(scipy.stats.nct.sf(critical, 13, noncentrality), abs=1e-6) == 0.80


@pytest.mark.parametrize(
    ("s_pct", "effect_pct", "want"),
    [(0.5, 1, 6), (1, 1, 17), (1, 2, 6), (1, 3, 4), (1, 5, 3), (2, 1, 64), (2, 2, 17), (2, 3, 9)],
)
def test_runs_needed_to_find_a_change(s_pct, effect_pct, want):
    assert want == reps_needed(s_pct / 100, effect_pct)


def test_noise_that_is_tiny_against_the_effect_still_needs_two_runs():
    assert reps_needed(0.0, 1.0) == 2


@pytest.mark.parametrize("power", [0.5, 0.8, 0.99, 0.9999999])
@pytest.mark.parametrize("n", [2, 3, 17, 1000])
def test_at_the_detectable_difference_the_noncentral_t_has_the_power_asked_for(n, power):
    df, noncentrality = 2 * n - 2, mde_pct(0.01, n, n, power=power) / math.sqrt(2 / n)
    critical = scipy.stats.t.ppf(0.975, df)

    above = scipy.stats.nct.sf(critical, df, noncentrality)
    below = scipy.stats.nct.cdf(-critical, df, noncentrality)  # NaN where it is too small

    assert power == pytest.approx(above + numpy.nan_to_num(below), abs=1e-8)


def test_two_runs_of_very_unequal_spread_have_one_df_and_can_see_little():
    got = compare_unpaired(sample(100.0, 100.001), sample(100.0, 103.0))
    standard_error = math.log1p(got.delta_pct / 100) / got.statistic
    critical = scipy.stats.t.ppf(0.975, got.df)

    assert pytest.approx(got.df, abs=1e-4) == 1.0
    assert pytest.approx(scipy.stats.nct.sf(critical, got.df, got.mde_pct / 100 / standard_error), abs=1e-4) == 0.80


def test_plans_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="s needs two values on each side"):
        mde_pct(0.01, 1, 3)
    with pytest.raises(ValueError, match="not negative"):
        mde_pct(-0.01, 3, 3)
    with pytest.raises(ValueError, match="expected 0 < alpha < power < 1"):
        mde_pct(0.01, 3, 3, power=0.04)
    with pytest.raises(ValueError, match="only a positive effect"):
        reps_needed(0.01, 0.0)


# Percentiles, pooling, boots


def test_the_percentile_is_not_the_maximum_of_a_small_sample():
    case = json.loads((CASES / "B20.json").read_text())

    assert percentile(case["a"], 95) == 95
    assert percentile(case["b"], 99) == 99


def test_the_percentile_is_an_observed_value_and_its_ends_are_the_extremes():
    assert percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 100) == 3.0
    assert percentile([7.0], 99) == 7.0


def test_the_rank_is_exact_where_a_rounded_fraction_gives_the_next_one():
    thousand = [float(i) for i in range(1, 1001)]

    assert percentile(thousand, 99.9) == 999.0
    assert numpy.percentile(thousand, 99.9, method="inverted_cdf") == 1000.0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.sampled_from([50, 90, 95, 99]))
def test_the_percentile_agrees_with_numpy(values, q):
    assert numpy.percentile(values, q, method="inverted_cdf") == percentile(values, q)


@pytest.mark.parametrize(
    ("values", "q", "message"),
    [([], 50, "no values"), ([1.0, math.nan], 50, "NaN among"), ([1.0], 101, "between 0 and 100")],
)
def test_a_percentile_of_nothing_is_refused(values, q, message):
    with pytest.raises(ValueError, match=message):
        percentile(values, q)


def test_cells_of_one_rig_pool_their_relative_s():
    cells = [A3, sample(842.1, 838.0, 845.9), sample(410.2, 412.9, 409.1), sample(2210.0, 2231.5, 2204.7)]
    s, df = pooled_relative_s(cells)

    assert pytest.approx([100 * cell.log_s for cell in cells], abs=5e-5) == [0.4553, 0.4693, 0.4756, 0.6396]
    assert pytest.approx(100 * s, abs=5e-6) == 0.51548
    assert 8 == df


def test_single_runs_add_nothing_to_a_pooled_s():
    s, df = pooled_relative_s([A3, sample(1.0)])

    assert (A3.log_s, 2) == (pytest.approx(s), df)
    assert pooled_relative_s([sample(1.0), sample(2.0)]) is None
    assert pooled_relative_s([]) is None


def test_with_several_boots_the_observation_is_the_boots_mean():
    got = boot_means([(10.0, 12.0, 14.0), (20.0, 20.0, 20.0)])

    assert got.values == (12.0, 20.0)
    assert got.notes == ("n = 2 boots × 3",)
    assert boot_means([(10.0, 12.0), (20.0,)]).notes == ("n = 2 boots × 1–2",)


def test_one_boot_cannot_be_an_observation_of_boots():
    with pytest.raises(ValueError, match="1 boot"):
        boot_means([(1.0, 2.0)])
    with pytest.raises(ValueError, match="a boot without values"):
        boot_means([(1.0,), ()])


def test_importing_the_module_does_not_import_scipy():
    code = "import sys, benchkit.stats; sys.exit('scipy' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
