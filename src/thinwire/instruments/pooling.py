"""Several runs at once: slopes pooled over seeds, and two runs step by step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.instruments.stationarity import Points
from thinwire.instruments.trend import MIN_POINTS, Estimate, fit_trend

POOLED_CONFIDENCE = 0.95
CROSSING_READINGS = 25
POOL_RULE = (
    f"Pooled slope: random effects (DerSimonian-Laird), {POOLED_CONFIDENCE:.0%} interval of Hartung, Knapp, "
    "Sidik and Jonkman with t of seeds - 1 degrees, never narrower than DerSimonian-Laird's own error gives."
)


@dataclass(frozen=True)
class Pooled:
    """Slope over seeds; `between_deviation` = standard deviation of the true slopes between seeds (tau)."""

    num_runs: int
    slope: Estimate
    between_deviation: float

    def interval(self) -> tuple[float, float]:
        return self.slope.interval(POOLED_CONFIDENCE)


@dataclass(frozen=True)
class Difference:
    """Second run minus first over their common steps.

    `crossing`: the step from which the sign of the 25-reading mean difference is the last one's and differs
    from the first one's (an early win that inverted); None where it never changed.
    """

    num_steps: int
    first: int
    last: int
    mean: float
    mean_estimate: Estimate | None
    slope: Estimate | None
    crossing: int | None


def pool(slopes: Sequence[Estimate]) -> Pooled:
    """Random-effects mean of two or more independent slopes.

    w_i = 1 / (se_i^2 + tau^2), mean = sum w_i b_i / sum w_i; with weights v_i = 1 / se_i^2 and their spread
    Q = sum v_i (b_i - mean_v)^2: tau^2 = max(0, (Q - (k - 1)) / (sum v - sum v^2 / sum v)) (DerSimonian and
    Laird, 1986). error^2 = max(1, H) / sum w_i,
    H = sum w_i (b_i - mean)^2 / (k - 1) (Hartung and Knapp 2001, Sidik and Jonkman 2002; the floor of 1 as in
    Roever, Knapp and Friede 2015, for few seeds). statsmodels' combine_effects agrees where
    Q > k - 1; below, it goes on with a negative tau^2.
    """
    if len(slopes) < 2:
        raise ValueError(f"slopes must be 2 or more seeds, got {len(slopes)}")
    values = np.array([slope.value for slope in slopes])
    variances = np.array([slope.standard_error**2 for slope in slopes])
    if not (variances > 0).all():  # a series without any noise: only the spread between seeds is left
        spread, k = float(values.std(ddof=1)), len(values)
        return Pooled(k, Estimate(float(values.mean()), spread / k**0.5, k - 1), spread)
    weights = 1 / variances
    mean = float(weights @ values / weights.sum())
    excess = float(weights @ (values - mean) ** 2) - (len(values) - 1)
    tau_squared = max(0.0, excess / float(weights.sum() - weights @ weights / weights.sum()))
    weights = 1 / (variances + tau_squared)
    mean = float(weights @ values / weights.sum())
    hartung_knapp = float(weights @ (values - mean) ** 2) / (len(values) - 1)
    error = float(np.sqrt(max(1.0, hartung_knapp) / weights.sum()))
    return Pooled(len(values), Estimate(mean, error, len(values) - 1), float(np.sqrt(tau_squared)))


def difference(first: Points, second: Points) -> Difference | None:
    """Second minus first at the steps both have, None where they have none in common."""
    steps, at_first, at_second = np.intersect1d(
        first.steps, second.steps, assume_unique=True, return_indices=True
    )
    if len(steps) == 0:
        return None
    values = second.values[at_second] - first.values[at_first]
    enough = len(values) >= MIN_POINTS
    return Difference(
        num_steps=len(steps),
        first=int(steps[0]),
        last=int(steps[-1]),
        mean=float(values.mean()),
        mean_estimate=fit_trend(steps, values, degree=0).mean() if enough else None,
        slope=fit_trend(steps, values).slope() if enough else None,
        crossing=_crossing(steps, values),
    )


def _crossing(steps: NDArray[np.int64], values: NDArray[np.float64]) -> int | None:
    if len(values) < 2 * CROSSING_READINGS:
        return None
    means = np.convolve(values, np.full(CROSSING_READINGS, 1 / CROSSING_READINGS), mode="valid")
    signs = np.sign(means)
    if signs[0] * signs[-1] >= 0:
        return None
    changed = int(np.flatnonzero(signs != signs[-1])[-1]) + 1
    return int(steps[changed + CROSSING_READINGS // 2])
