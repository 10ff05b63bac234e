"""Trends of autocorrelated series with intervals that hold their level: cheap enough for every step.

Letters: n points; x steps from their mean; p_j orthogonal polynomials of degree j in x.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import fft, stats

MAX_AUTOCORRELATION = 0.97
MIN_POINTS = 20


@dataclass(frozen=True)
class Estimate:
    """A number with its autocorrelation-robust standard error and the t law's degrees of freedom."""

    value: float
    standard_error: float
    dof: int

    def interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided: holds the true value with this probability."""
        reach = float(stats.t.ppf((1 + confidence) / 2, self.dof)) * self.standard_error
        return self.value - reach, self.value + reach


@dataclass(frozen=True)
class TrendFit:
    """Least squares on p_0 = 1, p_1 = x, p_2 = x^2 - skew x - width, whose coefficients do not correlate.

    value(x) = sum_j b_j p_j(x), var b_j = long-run variance / sum p_j^2. b_1 is the plain OLS slope at every
    degree; the slope at x is b_1 + b_2 (2 x - skew).
    """

    origin: float
    skew: float
    width: float
    coefficients: NDArray[np.float64]
    squares: NDArray[np.float64]
    long_run_variance: float
    dof: int

    def slope(self) -> Estimate:
        """b_1: OLS slope a step over the window."""
        return self._combine(np.array([0.0, 1.0, 0.0]))

    def acceleration(self) -> Estimate:
        """2 b_2: the slope's change a step; needs degree 2."""
        return self._combine(np.array([0.0, 0.0, 2.0]))

    def slope_at(self, step: float) -> Estimate:
        return self._combine(np.array([0.0, 1.0, 2 * (step - self.origin) - self.skew]))

    def mean(self) -> Estimate:
        """b_0: the mean of the values."""
        return self._combine(np.array([1.0, 0.0, 0.0]))

    def values_at(self, steps: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The fitted curve and its standard error at any steps, also beyond the window."""
        x = np.asarray(steps, dtype=np.float64) - self.origin
        basis = np.stack([np.ones_like(x), x, x**2 - self.skew * x - self.width])[: len(self.squares)]
        variance = (basis**2 / self.squares[:, None]).sum(axis=0) * self.long_run_variance
        return self.coefficients @ basis, np.sqrt(variance)

    def _combine(self, weights: NDArray[np.float64]) -> Estimate:
        weights = weights[: len(self.squares)]
        variance = float((weights**2 / self.squares).sum()) * self.long_run_variance
        return Estimate(float(weights @ self.coefficients), float(np.sqrt(variance)), self.dof)


def fit_trend(steps: ArrayLike, values: ArrayLike, degree: int = 1) -> TrendFit:
    """Mean, line or parabola (degree 0, 1, 2) through 20 or more finite readings at increasing steps.

    With residuals e: prewhiten u_i = e_i - r e_{i-1}, r the lag-1 autocorrelation plus (k + (k + 2) r) / n,
    k = degree + 1 (its bias after k fitted terms), held to 0..0.97; project u on cos(pi j (i + 1/2) / m),
    j = k..nu + k - 1 (lower ones are all but the polynomial itself, which the fit removed); the long-run
    variance is the mean square of the projections / (1 - r)^2, and estimate / standard error is compared with
    t of nu = round(0.4 n^(2/3)) degrees. Estimator and t law: Mueller (2007), Lazarus, Lewis, Stock and
    Watson (2018), a fixed-b limit in the sense of Kiefer and Vogelsang (2005); prewhitening: Andrews and
    Monahan (1992).

    Readings count as equally spaced for the autocorrelation; only the regression sees the steps' gaps.
    """
    t, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if y.ndim != 1 or t.shape != y.shape or len(y) < MIN_POINTS or not np.isfinite(y).all():
        raise ValueError(f"values must be {MIN_POINTS} or more finite numbers, one a step, got {y.size}")
    n, x = len(y), t - t.mean()
    skew, width = float((x**2 @ x) / (x @ x)), float(np.mean(x**2))
    basis = np.stack([np.ones(n), x, x**2 - skew * x - width])[: degree + 1]
    squares = np.einsum("kn,kn->k", basis, basis)
    coefficients = np.array([row @ y for row in basis]) / squares
    variance, dof = long_run_variance(y - coefficients @ basis, num_terms=degree + 1)
    return TrendFit(float(t.mean()), skew, width, coefficients, squares, variance, dof)


def long_run_variance(residuals: NDArray[np.float64], num_terms: int) -> tuple[float, int]:
    """Long-run variance of residuals from `num_terms` fitted terms, and its degrees; formula in fit_trend."""
    n = len(residuals)
    r = lag_one(residuals, num_terms)
    u = residuals[1:] - r * residuals[:-1]
    dof = max(4, round(0.4 * n ** (2 / 3)))
    # The type-2 transform is 2 sum_i u_i cos(pi j (i + 1/2) / m).
    projections = fft.dct(u, type=2)[num_terms : num_terms + dof] / np.sqrt(2 * len(u))
    return float(np.mean(projections**2)) / (1 - r) ** 2, dof


def lag_one(residuals: NDArray[np.float64], num_terms: int) -> float:
    """Lag-1 autocorrelation of residuals, corrected for the fit's bias, held to 0..0.97."""
    n, energy = len(residuals), float(residuals @ residuals)
    r = float(residuals[1:] @ residuals[:-1]) / energy if energy > 0 else 0.0
    return min(MAX_AUTOCORRELATION, max(0.0, r + (num_terms + (num_terms + 2) * r) / n))


@dataclass(frozen=True)
class Slope:
    """OLS slope a step, its autocorrelation-robust standard error, and the t law's degrees of freedom."""

    slope: float
    standard_error: float
    dof: int

    def lower_limit(self, level: float) -> float:
        """One-sided: below the true slope of a stationary error with probability 1 - level."""
        return self.slope - float(stats.t.ppf(1.0 - level, self.dof)) * self.standard_error

    def upper_limit(self, level: float) -> float:
        """One-sided, from above."""
        return self.slope + float(stats.t.ppf(1.0 - level, self.dof)) * self.standard_error


def robust_slope(values: Sequence[float]) -> Slope:
    """OLS slope of equally spaced values (20 or more) with an equal-weighted-cosine long-run variance.

    The slope and standard error of fit_trend at steps 0, 1, 2, ... Measured one-sided level at 0.001, n = 60:
    0.0013 white, 0.0015 at AR(1) 0.5, 0.007 at 0.9; at 0.05, n = 120: 0.050, 0.046, 0.060.
    """
    y = np.asarray(values, dtype=np.float64)
    slope = fit_trend(np.arange(y.size), y).slope()
    return Slope(slope.value, slope.standard_error, slope.dof)
