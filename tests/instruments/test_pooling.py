"""Pooled slopes equal statsmodels', and matched steps find an early win that inverted."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects

from tests.instruments.series import autoregressive
from thinwire.instruments.pooling import difference, pool
from thinwire.instruments.stationarity import points
from thinwire.instruments.trend import Estimate


def test_the_pooled_slope_and_interval_are_those_of_statsmodels():
    """Slopes far apart: Hartung-Knapp's error is the larger one and is used as it is."""
    slopes = [Estimate(0.01, 0.002, 20), Estimate(0.04, 0.003, 20), Estimate(-0.02, 0.001, 20)]
    found = pool(slopes)
    expected = combine_effects(
        np.array([s.value for s in slopes]),
        np.array([s.standard_error**2 for s in slopes]),
        method_re="dl",
        use_t=True,
    )
    error = max(expected.sd_eff_w_re_hksj, expected.sd_eff_w_re)
    reach = stats.t.ppf(0.975, 2) * error
    assert found.interval() == pytest.approx(
        (expected.mean_effect_re - reach, expected.mean_effect_re + reach), rel=1e-12
    )
    assert found.between_deviation == pytest.approx(np.sqrt(expected.tau2))


def test_equal_slopes_do_not_shrink_the_interval_below_their_own_errors():
    """Hartung-Knapp alone gives width 0 here."""
    found = pool([Estimate(0.01, 0.002, 20)] * 3)
    assert found.slope.standard_error == pytest.approx(0.002 / np.sqrt(3), rel=1e-9)


def test_the_interval_over_three_seeds_holds_its_level():
    """Deviation 0.003 between seeds, own error 0.002: 95% intervals miss in at most 8% of 500."""
    rng = np.random.default_rng(0)
    draws = 0.003 * rng.standard_normal((500, 3)) + 0.002 * rng.standard_normal((500, 3))
    missed = 0
    for row in draws:
        low, high = pool([Estimate(value, 0.002, 20) for value in row]).interval()
        missed += low > 0 or high < 0
    assert missed / 500 <= 0.08


def test_slopes_without_noise_are_pooled_by_their_spread_and_one_seed_is_refused():
    assert pool([Estimate(1.0, 0.0, 4), Estimate(3.0, 0.0, 4)]).slope.value == 2.0
    with pytest.raises(ValueError, match="2 or more"):
        pool([Estimate(1.0, 0.1, 4)])


def test_matched_steps_find_the_step_at_which_an_early_win_inverts():
    steps = np.arange(1, 601)
    low_then_high = 3 + 0.02 * steps + 0.1 * autoregressive(0, 600, 0.5)
    found = difference(points(steps, np.full(600, 11.4)), points(steps[:-20], low_then_high[:-20]))
    assert (found.num_steps, found.first, found.last) == (580, 1, 580)
    assert abs(found.crossing - 420) <= 15
    assert found.slope.value == pytest.approx(0.02, abs=1e-3)


def test_runs_without_a_common_step_have_no_difference():
    assert difference(points([1, 3], [1.0, 1.0]), points([2, 4], [1.0, 1.0])) is None
    one = difference(points([1, 3], [1.0, 1.0]), points([3, 4], [4.0, 1.0]))
    assert (one.num_steps, one.mean, one.slope, one.crossing) == (1, 3.0, None, None)
