"""Charts with logarithmic axes: what is drawn, what cannot be, and where the ticks stand."""

import math

import pytest

from thinwire.reports.loglog import Curve, apart, log_ticks, loglog_svg


def test_points_intervals_and_labels_are_drawn_and_escaped():
    svg = loglog_svg([Curve("a<b", [(0.5, 2.0, 1.0, 3.0), (4.0, 0.2, 0.1, 0.3)])], "bits", "gap")
    assert svg.count("<circle") == 2
    assert svg.count("whisker") == 2
    assert "a&lt;b" in svg
    assert "a<b" not in svg


def test_what_a_logarithm_cannot_show_is_left_out():
    points = [(1.0, 0.0, 0.0, 0.0), (2.0, math.nan, 1.0, 1.0), (3.0, 1.0, -1.0, 2.0)]
    assert loglog_svg([Curve("a", points)], "x", "y").count("<circle") == 1
    assert loglog_svg([Curve("a", points[:2])], "x", "y") == ""
    assert loglog_svg([], "x", "y") == ""


def test_references_are_dashed_without_points():
    line = [(1.0, 1.0, 1.0, 1.0), (9.0, 3.0, 3.0, 3.0)]
    svg = loglog_svg([Curve("sqrt T", line, dashed=True), Curve("a", line, slot=10)], "x", "y")
    assert svg.count("mark level") == 1
    assert svg.count('class="hollow s1"') == 2  # the tenth curve takes the colours' second turn


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 1.0, [1, 2, 5, 10]), (-1.0, 2.0, [0.1, 1, 10, 100]), (-0.1, 0.1, [1])],
)
def test_ticks_are_round_numbers_in_range(low, high, ticks):
    assert log_ticks(low, high) == pytest.approx(ticks)


def test_labels_stay_apart_and_inside():
    assert apart([10.0, 50.0, 90.0], 0.0, 100.0) == [10.0, 50.0, 90.0]
    assert apart([1.0, 1.0, 1.0], 0.0, 100.0) == [1.0, 17.0, 33.0]
    assert apart([95.0, 99.0, 100.0], 0.0, 100.0) == [68.0, 84.0, 100.0]
    assert apart([-5.0], 0.0, 100.0) == [0.0]
