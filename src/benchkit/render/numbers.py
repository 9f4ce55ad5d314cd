"""Numbers as a table prints them: units scaled, s to two significant digits, signs always shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How the values of one metric are printed: times `factor`, in `unit`; differences in `delta_unit`."""

    factor: float
    unit: str
    delta_unit: str


def shown_as(unit: str, values: Iterable[float], *, ratio: bool) -> Shown:
    """How to print values of a unit: seconds below 10 as ms, shares as per cent, the rest as they are.

    Args:
        unit: the glossary's unit.
        values: all values that the heading's unit will stand for.
        ratio: differences are per cent; else they are in the unit, and points for shares.
    """
    if unit == "share":
        return Shown(factor=100.0, unit="%", delta_unit="%" if ratio else "pt")
    if unit == "s" and max(map(abs, values), default=math.inf) < 10:
        return Shown(factor=1000.0, unit="ms", delta_unit="%" if ratio else "ms")
    return Shown(factor=1.0, unit=unit, delta_unit="%" if ratio else unit)


def mean_and_s(mean: float, s: float | None, factor: float = 1.0) -> str:
    """`1505.4 ± 6.9`: s to two significant digits, the mean to the same decimals.

    Without s the mean stands alone, to four significant digits, whole numbers never rounded. An s that is
    only the rounding of equal values is 0.
    """
    mean = mean * factor
    if s is None:
        return _fixed(mean, _decimals(mean, 4))
    s = s * factor
    if s <= 1e-9 * abs(mean):
        return f"{_fixed(mean, _decimals(mean, 4))} ± 0"
    # Not clipped at 0: 1234 ± 120 says what 1234 ± 123 would claim to know better.
    decimals = _two_digits(s)
    return f"{_fixed(mean, decimals)} ± {_fixed(s, decimals)}"


def delta(difference: float, interval: tuple[float, float] | None, unit: str, factor: float = 1.0) -> str:
    """`+2.6 % [+1.6, +3.6]`: a difference and its interval, always signed.

    One decimal for half widths from 0.3 on, none from 10 on, more below: enough to see the interval's ends
    apart, and the same for most rows of a column.
    """
    blank = f" {unit}" if unit else ""
    if interval is None:
        return f"{signed(difference * factor, 1)}{blank}"
    low, high = (bound * factor for bound in interval)
    half = (high - low) / 2
    decimals = 1 if math.isinf(half) else 0 if half >= 10 else 1 if half >= 0.3 else 2 if half >= 0.03 else 3
    difference_text = signed(difference * factor, decimals)
    return f"{difference_text}{blank} [{signed(low, decimals)}, {signed(high, decimals)}]"


def t_and_sigma(statistic: float, df: float, sigma: float) -> str:
    """`7.0 (4.0), 3.1 σ`: t with its degrees of freedom, and the normal deviate of the same p."""
    return f"{signed(statistic, 1).lstrip('+')} ({df:.1f}), {sigma:.1f} σ"


def signed(value: float, decimals: int) -> str:
    """A number with its sign, a true minus for negatives, none for what rounds to zero."""
    if math.isinf(value):
        return "+∞" if value > 0 else "−∞"
    text = f"{abs(value):.{decimals}f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else "−") + text


def _fixed(value: float, decimals: int) -> str:
    """A number to so many decimals; negative ones round to tens, hundreds, and so on."""
    text = f"{round(value, decimals):.{max(0, decimals)}f}"
    return text if float(text) != 0 else text.lstrip("-")


def _two_digits(value: float) -> int:
    """The decimals at which a positive value shows two significant digits, after rounding (0.0996 is 0.10)."""
    return 1 - int(f"{value:.1e}".partition("e")[2])


def _decimals(value: float, digits: int) -> int:
    """The decimals at which a value shows so many significant digits, at least as many as a whole number has."""
    exponent = int(f"{abs(value):.{digits - 1}e}".partition("e")[2])
    return max(0, digits - 1 - exponent)
