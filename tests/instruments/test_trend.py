"""The robust slope: OLS exactly, and a limit that holds its level on autocorrelated series."""

import numpy as np
import pytest
from scipy import stats

from thinwire.instruments.trend import robust_slope


def test_the_slope_is_ordinary_least_squares():
    values = np.random.default_rng(0).standard_normal(77).cumsum()
    expected = stats.linregress(np.arange(77), values).slope
    assert robust_slope(values).slope == pytest.approx(expected, rel=1e-12)  # two float64 orders of summation


def test_on_white_noise_the_standard_error_is_that_of_ols_in_the_mean():
    """400 series of 120: mean square over the true variance; its own sd is sqrt(2 / 10) / 20 = 0.02."""
    rng = np.random.default_rng(1)
    x = np.arange(120) - 59.5
    squares = [robust_slope(rng.standard_normal(120)).standard_error ** 2 * (x @ x) for _ in range(400)]
    assert np.mean(squares) == pytest.approx(
        1.0, abs=0.12
    )  # prewhitening's bias correction adds a few percent


@pytest.mark.parametrize(("rho", "bound"), [(0.0, 0.07), (0.5, 0.07), (0.9, 0.085)])
def test_the_lower_limit_holds_its_level(rho, bound):
    """1,000 series of 120 at 0.05: 0.050, 0.046, 0.060 over 4,000; the bounds are 3 sd (0.007) above."""
    rng = np.random.default_rng(2)
    noise = rng.standard_normal((1000, 320))
    series = np.zeros_like(noise)
    for i in range(1, 320):
        series[:, i] = rho * series[:, i - 1] + noise[:, i]
    over = np.mean([robust_slope(row[200:]).lower_limit(0.05) > 0 for row in series])
    assert over <= bound


def test_a_line_without_noise_has_no_error():
    trend = robust_slope(3.0 + 0.5 * np.arange(50))
    assert trend.lower_limit(0.001) == pytest.approx(0.5, abs=1e-12)
    assert trend.upper_limit(0.001) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("values", [[1.0] * 19, [1.0] * 19 + [np.nan], np.ones((5, 20))])
def test_too_few_or_bad_values_are_refused(values):
    with pytest.raises(ValueError, match="20 or more finite"):
        robust_slope(values)
