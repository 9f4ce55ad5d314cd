"""How numbers are printed: digits, signs and units."""

import math

import pytest

from benchkit.render.numbers import delta, mean_and_s, shown_as, signed, t_and_sigma


@pytest.mark.parametrize(
    ("mean", "s", "text"),
    [
        (1505.4, 6.8549, "1505.4 ± 6.9"),
        (1505.4, 68.549, "1505 ± 69"),
        (15234.0, 123.4, "15230 ± 120"),
        (0.5, 0.0996, "0.50 ± 0.10"),
        (99.96, 9.96, "100 ± 10"),
        (0.0123, 0.00045, "0.01230 ± 0.00045"),
        (0.0, 1.5, "0.0 ± 1.5"),
        (-0.01, 1.5, "0.0 ± 1.5"),
    ],
)
def test_s_has_two_significant_digits_and_the_mean_as_many_decimals(mean, s, text):
    assert text == mean_and_s(mean, s)


@pytest.mark.parametrize(
    ("mean", "s", "text"),
    [
        (1512.4, None, "1512"),
        (151234.6, None, "151235"),
        (41.5, None, "41.50"),
        (0.0123456, None, "0.01235"),
        (0.0, None, "0.000"),
        (5.0, 0.0, "5.000 ± 0"),
        (1505.4, 2.3e-13, "1505 ± 0"),
    ],
)
def test_without_a_spread_the_mean_has_four_significant_digits(mean, s, text):
    assert text == mean_and_s(mean, s)


@pytest.mark.parametrize(
    ("difference", "interval", "text"),
    [
        (2.597, (1.563, 3.643), "+2.6 % [+1.6, +3.6]"),
        (1.043, (0.853, 1.234), "+1.04 % [+0.85, +1.23]"),
        (-2.531, (-3.515, -1.539), "−2.5 % [−3.5, −1.5]"),
        (-20.0, (-22.06, -17.89), "−20.0 % [−22.1, −17.9]"),
        (25.4, (13.1, 37.2), "+25 % [+13, +37]"),
        (0.00001, (-0.00002, 0.00003), "0.000 % [0.000, 0.000]"),
        (-0.04, None, "0.0 %"),
        (3.0, (-100.0, math.inf), "+3.0 % [−100.0, +∞]"),
    ],
)
def test_a_difference_has_its_sign_and_its_interval_to_as_many_decimals_as_it_needs(difference, interval, text):
    assert text == delta(difference, interval, "%")


def test_t_has_its_df_and_the_normal_deviate_of_the_same_p():
    assert "7.0 (4.0), 3.1 σ" == t_and_sigma(7.0269, 3.9943, 3.07)
    assert "−1.0 (1.0), 0.7 σ" == t_and_sigma(-1.0, 1.0, 0.674)
    assert "0.0 (3.0), 0.0 σ" == t_and_sigma(0.0, 3.0, 0.0)


def test_seconds_below_ten_are_printed_as_milliseconds_and_shares_as_per_cent():
    short, long = shown_as("s", [0.1, 9.9], ratio=True), shown_as("s", [0.1, 10.0], ratio=True)
    share = shown_as("share", [0.85], ratio=False)

    assert ((1000.0, "ms"), (1.0, "s")) == ((short.factor, short.unit), (long.factor, long.unit))
    assert (100.0, "%", "pt") == (share.factor, share.unit, share.delta_unit)
    assert "+5.0 pt [+1.2, +8.8]" == delta(0.05, (0.012, 0.088), share.delta_unit, share.factor)


def test_a_sign_never_stands_before_zero():
    assert ["0.0", "0", "+0.1", "−0.1", "−∞"] == [
        signed(-0.04, 1),
        signed(0.4, 0),
        signed(0.1, 1),
        signed(-0.1, 1),
        signed(-math.inf, 1),
    ]
