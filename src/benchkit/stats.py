"""The arithmetic of doubt: samples of runs, their comparison with interval and p, and the verdict.

Nothing here knows what an LLM is. A value is one run's figure; ratios are taken in logs, because a ratio
is what a table prints and what multiplies across cells; differences serve shares and counts, which may
be zero. scipy.special is imported inside the functions that need it: scipy.stats has the same
distributions, and costs half a second at the start of every command.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["parity", "leads", "trails", "unresolved"]
Better = Literal["higher", "lower"]
Scale = Literal["ratio", "difference"]
TestName = Literal["welch-log", "paired-log", "difference", "paired-difference", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The values of one metric in one cell, one per rep; never empty, every value finite.

    A metric that was not measured has no Sample: None stands in its place, and no value here is a zero
    that means "missing". Raises ValueError for no values and for NaN or infinite ones.
    """

    values: tuple[float, ...]
    notes: tuple[str, ...] = ()
    """Doubts about the values; each becomes a footnote."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a sample needs at least one value; what was not measured has no sample")
        for place, value in enumerate(self.values):
            if not math.isfinite(value):
                raise ValueError(f"value {place} of the sample is {value}; expected a finite number")

    @property
    def n(self) -> int:
        """Number of values."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return _mean(self.values)

    @property
    def s(self) -> float | None:
        """Sample standard deviation (ddof = 1); None for fewer than two values, never 0.0 for "unknown"."""
        return _sd(self.values) if self.n > 1 else None

    @property
    def log_mean(self) -> float:
        """Mean of the natural logs, the log of the geometric mean. Raises ValueError for a value ≤ 0."""
        return _mean(_logs(self, "the sample"))

    @property
    def log_s(self) -> float | None:
        """Relative s: standard deviation of the natural logs (ddof = 1); None for fewer than two values."""
        logs = _logs(self, "the sample")
        return _sd(logs) if self.n > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """B relative to A: how far apart, how sure, and what could have been seen.

    On the scale "ratio" the fields named `_pct` are per cent, 100·(exp(x) − 1) of a difference of mean
    logs x. On the scale "difference" they are plain differences in the metric's own unit: a share that
    went from 0.80 to 0.85 has `delta_pct` 0.05.

    Where there is no measured noise (one value on either side, or no spread at all on both) everything but
    `delta_pct` is None and `test` is "none". A spread of exactly zero is as good as never what a clock saw;
    it gives no finite t, and an interval of no width would claim a certainty that nobody measured.
    """

    scale: Scale
    delta_pct: float
    ci_pct: tuple[float, float] | None
    """95 % interval of `delta_pct`."""
    ratio90_pct: tuple[float, float] | None
    """90 % interval of `delta_pct`, the one that equivalence is read from."""
    test: TestName
    statistic: float | None
    """Student's t: the difference over its standard error. Its sign is that of `delta_pct`."""
    df: float | None
    p: float | None
    """Two-sided."""
    sigma_equiv: float | None
    """The normal deviate that has the same two-sided p: what "σ" may be called when df is small."""
    mde_pct: float | None
    """What this test finds with power 0.80 at alpha 0.05: `mde_pct` with its own standard error and df."""
    n_a: int
    n_b: int


def compare_unpaired(a: Sample, b: Sample) -> Comparison:
    """The ratio B/A of two independent samples by Welch's t-test on natural logs.

    t = d / SE with d = mean log B − mean log A, SE² = sA²/nA + sB²/nB, df by `welch_df`: Welch, "The
    generalization of 'Student's' problem when several different population variances are involved",
    Biometrika 34 (1947). Raises ValueError for values ≤ 0; `compare_difference` takes those.
    """
    return _welch(_logs(a, "sample A"), _logs(b, "sample B"), "ratio")


def compare_paired(a: Sample, b: Sample) -> Comparison:
    """The ratio B/A of samples whose i-th values share a block, by the t-test on differences of logs.

    The pairing has to be declared before the runs: found afterwards it is one more way to look for a small
    p. Raises ValueError for values ≤ 0 and for samples of different length.
    """
    return _paired(_logs(a, "sample A"), _logs(b, "sample B"), "ratio")


def compare_difference(a: Sample, b: Sample, *, paired: bool = False) -> Comparison:
    """The plain difference B − A, for shares and counts: Welch's t-test on the values as they are.

    With `paired`, the t-test on the differences of values that share a block; raises ValueError if the
    samples then differ in length.
    """
    return (_paired if paired else _welch)(a.values, b.values, "difference")


def holm(ps: Sequence[float | None]) -> tuple[float | None, ...]:
    """The p-values of one family, adjusted by Holm's step-down method, in the order given.

    None (no test was possible) stays None and does not count in the family. Source: S. Holm, "A simple
    sequentially rejective multiple test procedure", Scand. J. Statist. 6 (1979).
    """
    ranked = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, place) in enumerate(ranked):
        highest = max(highest, min(1.0, (len(ranked) - rank) * p))
        adjusted[place] = highest
    return tuple(adjusted)


def equivalent(comparison: Comparison, margin_pct: float) -> bool:
    """Whether both one-sided tests reject "B differs from A by more than the margin", each at 0.05 (TOST).

    That is the same as the 90 % interval lying inside [log(1 − m), log(1 + m)]: D. J. Schuirmann,
    J. Pharmacokinet. Biopharm. 15 (1987). On the scale "difference" the margin is in hundredths of the
    metric's unit, so 1 means one percentage point of a share. Without an interval nothing is equivalent.
    """
    if comparison.ratio90_pct is None:
        return False
    margin = margin_pct if comparison.scale == "ratio" else margin_pct / 100
    low, high = comparison.ratio90_pct
    return -margin < low and high < margin


def verdict(comparison: Comparison, p_adjusted: float | None, margin_pct: float, better: Better) -> Verdict:
    """What may be said of B in the metric's better direction: parity first, then leads or trails.

    `p_adjusted` is the Holm-adjusted p over the table's cells. A difference that is significant and yet
    wholly inside the margin is parity; one that is not significant is unresolved, never parity.
    """
    if equivalent(comparison, margin_pct):
        return "parity"
    if p_adjusted is None or p_adjusted >= 0.05:
        return "unresolved"
    return "leads" if (comparison.delta_pct > 0) == (better == "higher") else "trails"


def mde_pct(s_rel: float, n_a: int, n_b: int, power: float = 0.80, alpha: float = 0.05) -> float:
    """The smallest true difference, in per cent, that an unpaired two-sided t-test finds with this power.

    `s_rel` is the relative standard deviation of one run (0.01 for 1 %), common to both sides. The figure is
    100 times a difference of logs: the middle between the rise exp(x) − 1 and the fall 1 − exp(−x), which
    part only where x is large. From the noncentral t on n_a + n_b − 2 df; at three runs a side the normal
    shortcut 2.8·s·sqrt(2/n) promises a quarter too much. Raises ValueError unless both sides have two values.
    """
    if n_a < 2 or n_b < 2:
        raise ValueError(f"n_a = {n_a}, n_b = {n_b}: s needs two values on each side")
    if s_rel < 0:
        raise ValueError(f"s_rel = {s_rel}: a standard deviation is not negative")
    standard_error = s_rel * math.sqrt(1 / n_a + 1 / n_b)
    return 100 * standard_error * _detectable_t(n_a + n_b - 2, power, alpha)


def reps_needed(s_rel: float, effect_pct: float, power: float = 0.80, alpha: float = 0.05) -> int:
    """The least number of runs on each side with which a true difference of `effect_pct` is found.

    The inverse of `mde_pct`, never below 2. Raises ValueError for an effect that is not positive.
    """
    if effect_pct <= 0:
        raise ValueError(f"effect_pct = {effect_pct}: only a positive effect can be looked for")

    def enough(n: int) -> bool:
        return mde_pct(s_rel, n, n, power, alpha) <= effect_pct

    too_few, found = 1, 2
    while not enough(found):
        too_few, found = found, 2 * found
    while found - too_few > 1:
        middle = (too_few + found) // 2
        too_few, found = (too_few, middle) if enough(middle) else (middle, found)
    return found


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 ≤ q ≤ 100) as an observed value: the least one that q % of all do not exceed.

    numpy calls this "inverted_cdf", and the rank is ceil(n·q/100). numpy multiplies n by q/100 rounded, so
    that its p99.9 of 1,000 values is the maximum; here it is the 999th, as the definition says. Raises
    ValueError for no values, for NaN, and for q out of range.
    """
    if not values:
        raise ValueError("no values: a percentile is one of them")
    if any(math.isnan(value) for value in values):
        raise ValueError("NaN among the values: it has no place in their order")
    if not 0 <= q <= 100:
        raise ValueError(f"q = {q}: expected a percentage between 0 and 100")
    return sorted(values)[max(1, math.ceil(len(values) * q / 100)) - 1]


def pooled_relative_s(samples: Sequence[Sample]) -> tuple[float, int] | None:
    """The relative s that several samples share, and its df: s² = Σ(n − 1)·s² / Σ(n − 1) over their logs.

    Cells of one protocol on one rig usually vary alike in per cent, and three runs alone hardly know
    their s. Samples of one value add nothing; None if no sample has two. Raises ValueError for values ≤ 0.
    """
    spreads = [(sample.n - 1, s) for sample in samples if (s := sample.log_s) is not None]
    df = sum(weight for weight, _ in spreads)
    return (math.sqrt(math.fsum(weight * s * s for weight, s in spreads) / df), df) if df else None


def welch_df(s_a: float, n_a: int, s_b: float, n_b: int) -> float:
    """The degrees of freedom of a difference of means with unequal variances (Welch-Satterthwaite).

    F. E. Satterthwaite, Biometrics Bull. 2 (1946). Raises ValueError if both s are zero or an n is below 2.
    """
    if n_a < 2 or n_b < 2:
        raise ValueError(f"n_a = {n_a}, n_b = {n_b}: s needs two values on each side")
    largest = max(s_a, s_b)
    if largest <= 0:
        raise ValueError("no spread on either side: the degrees of freedom are undefined")
    # Only the ratio of the two matters; scaled to 1 neither square can underflow.
    part_a, part_b = (s_a / largest) ** 2 / n_a, (s_b / largest) ** 2 / n_b
    return (part_a + part_b) ** 2 / (part_a**2 / (n_a - 1) + part_b**2 / (n_b - 1))


def boot_means(values_by_boot: Sequence[Sequence[float]]) -> Sample:
    """The sample whose observations are the means of server boots, with a note "k boots × r".

    Runs of one boot share its luck (memory layout, captured graphs), so with k ≥ 2 boots the boot is what
    was repeated. Raises ValueError for fewer than two boots and for a boot without values.
    """
    if len(values_by_boot) < 2:
        raise ValueError(f"{len(values_by_boot)} boot: its mean is an observation only beside another's")
    if not all(values_by_boot):
        raise ValueError("a boot without values has no mean")
    sizes = sorted({len(values) for values in values_by_boot})
    reps = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    return Sample(
        values=tuple(_mean(values) for values in values_by_boot),
        notes=(f"n = {len(values_by_boot)} boots × {reps}",),
    )


def _welch(a: Sequence[float], b: Sequence[float], scale: Scale) -> Comparison:
    test: TestName = "welch-log" if scale == "ratio" else "difference"
    delta, rounding = _mean(b) - _mean(a), _rounding(scale, a, b)
    s_a, s_b = (_sd(values, rounding) if len(values) > 1 else None for values in (a, b))
    if s_a is None or s_b is None or s_a == s_b == 0:
        return _compared(delta, None, None, scale, test, len(a), len(b))
    standard_error = math.hypot(s_a / math.sqrt(len(a)), s_b / math.sqrt(len(b)))
    return _compared(delta, standard_error, welch_df(s_a, len(a), s_b, len(b)), scale, test, len(a), len(b))


def _paired(a: Sequence[float], b: Sequence[float], scale: Scale) -> Comparison:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values in A and {len(b)} in B: every pair needs both")
    test: TestName = "paired-log" if scale == "ratio" else "paired-difference"
    differences, n = [right - left for left, right in zip(a, b, strict=True)], len(a)
    s = _sd(differences, _rounding(scale, a, b)) if n > 1 else 0.0
    return _compared(_mean(differences), s / math.sqrt(n) if s else None, n - 1, scale, test, n, n)


def _compared(
    delta: float,
    standard_error: float | None,
    df: float | None,
    scale: Scale,
    test: TestName,
    n_a: int,
    n_b: int,
) -> Comparison:
    """The comparison that a difference, its standard error and its df amount to."""
    shown: Callable[[float], float] = _pct if scale == "ratio" else float
    if standard_error is None or df is None:
        return Comparison(
            scale=scale,
            delta_pct=shown(delta),
            ci_pct=None,
            ratio90_pct=None,
            test="none",
            statistic=None,
            df=None,
            p=None,
            sigma_equiv=None,
            mde_pct=None,
            n_a=n_a,
            n_b=n_b,
        )
    from scipy.special import ndtri, stdtr, stdtrit

    def interval(confidence: float) -> tuple[float, float]:
        half = float(stdtrit(df, 0.5 + confidence / 2)) * standard_error
        return shown(delta - half), shown(delta + half)

    t = delta / standard_error
    # A p below the smallest float is still not zero, and its normal deviate not infinite.
    p = max(2 * float(stdtr(df, -abs(t))), 2.0**-1022)
    detectable = standard_error * _detectable_t(df, 0.80, 0.05)
    return Comparison(
        scale=scale,
        delta_pct=shown(delta),
        ci_pct=interval(0.95),
        ratio90_pct=interval(0.90),
        test=test,
        statistic=t,
        df=df,
        p=p,
        sigma_equiv=-float(ndtri(p / 2)),
        mde_pct=100 * detectable if scale == "ratio" else detectable,
        n_a=n_a,
        n_b=n_b,
    )


def _detectable_t(df: float, power: float, alpha: float) -> float:
    """The noncentrality with which a two-sided t-test at `alpha` rejects with probability `power`."""
    if not 0 < alpha < power < 1:
        raise ValueError(f"alpha = {alpha}, power = {power}: expected 0 < alpha < power < 1")
    from scipy.special import nctdtr, stdtrit

    critical = float(stdtrit(df, 1 - alpha / 2))

    def reached(noncentrality: float) -> float:
        above = 1 - float(nctdtr(df, noncentrality, critical))
        # The tail on the wrong side is the null's at 0 and fades from there. Far out scipy answers NaN,
        # where the truth is too small to count.
        below = float(nctdtr(df, noncentrality, -critical))
        return above if math.isnan(below) else above + below

    low, high = 0.0, 1.0
    while reached(high) < power:
        low, high = high, 2 * high
    # Bisection to the last bits: sixty halvings cost a millisecond, and nothing has to be smooth.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < power else (low, middle)
    return high


def _logs(sample: Sample, name: str) -> tuple[float, ...]:
    for place, value in enumerate(sample.values):
        if value <= 0:
            raise ValueError(
                f"value {place} of {name} is {value}: a ratio needs positive values; "
                "shares and counts are compared by their difference"
            )
    return tuple(math.log(value) for value in sample.values)


def _rounding(scale: Scale, a: Sequence[float], b: Sequence[float]) -> float:
    """The spread that rounding alone can give: it measures no noise, and a t over it would be fiction."""
    # Every term is rounded at its own size, however small the difference of two; and a log never better
    # than one eps, because its argument was rounded.
    largest = max(1.0 if scale == "ratio" else 0.0, *map(abs, a), *map(abs, b))
    return 4 * 2.0**-52 * largest


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _sd(values: Sequence[float], rounding: float = 0.0) -> float:
    """Standard deviation (ddof = 1) of two values or more; 0 where all are equal but for `rounding`."""
    # Equal values go out here: their mean may differ from them in its last bit.
    if max(values) - min(values) <= rounding:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _pct(log_ratio: float) -> float:
    try:
        return 100 * math.expm1(log_ratio)
    except OverflowError:  # the upper bound from two values that differ by many orders of magnitude
        return math.inf
