"""What one series says about its own level, slope and curvature: estimates with intervals, no verdict.

Intervals of slope, acceleration and projection hold their level under autocorrelation (trend.fit_trend).
Theil-Sen's and Mann-Kendall's assume independent readings and are too narrow where readings correlate.
Letters: n readings.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage, stats

from thinwire.instruments.trend import MIN_POINTS, Estimate, TrendFit, fit_trend, lag_one, long_run_variance

CONFIDENCE = 0.99
"""Of every interval. Three tests of 1% each keep the false alarms of a verdict below 5%."""
BLOCK_STEPS = 50
MIN_SEGMENT = 30
CHANGE_LEVEL = 0.01
CHANGE_RULE = (
    f"Change point: binary segmentation for shifts of the level. Of a stretch of {2 * MIN_SEGMENT} or "
    f"more readings the split, {MIN_SEGMENT} or more from its ends, with the largest cumulated deviation "
    f"from the mean counts where that exceeds the {CHANGE_LEVEL:.0%} point of Kolmogorov's law (long-run "
    "variance of the residuals from both means); both parts are searched again. A trend can show as one "
    "or more of them."
)
SPIKE_WINDOW = 11
SPIKE_DEVIATIONS = 6.0
MAX_PAIRWISE = 2000
"""Theil-Sen compares all pairs: of longer series every k-th reading is used."""
HORIZON_WINDOWS = 20
MAX_GRID = 200_000


@dataclass(frozen=True)
class Points:
    """Finite readings at strictly increasing steps; `num_left_out` readings were neither."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    num_left_out: int = 0

    def __len__(self) -> int:
        return len(self.steps)

    def between(self, first: int | None, last: int | None) -> "Points":
        """The readings of steps first..last, both included; None leaves a side open."""
        inside = np.ones(len(self), dtype=bool)
        if first is not None:
            inside &= self.steps >= first
        if last is not None:
            inside &= self.steps <= last
        return Points(self.steps[inside], self.values[inside], self.num_left_out)


@dataclass(frozen=True)
class Block:
    """Readings of steps first..last (50 of them, or what the window's end leaves)."""

    first: int
    last: int
    num_readings: int
    median: float
    maximum: float


@dataclass(frozen=True)
class Projection:
    """The step at which the fitted curve reaches `bound`, and the interval of that step.

    None: not up to step `horizon`. `earliest` is None too where no crossing is in sight at all.
    """

    bound: float
    crossing: float | None
    earliest: float | None
    latest: float | None
    horizon: int
    degree: int


@dataclass(frozen=True)
class Statistics:
    """Everything `thinwire analyze` prints of a series; None where there are too few readings for it."""

    num_readings: int
    num_left_out: int
    first: int
    last: int
    ols_slope: float | None
    newey_west_error: float | None
    newey_west_lags: int | None
    slope: Estimate | None
    acceleration: Estimate | None
    autocorrelation: float | None
    theil_sen: tuple[float, float, float] | None
    mann_kendall: tuple[float, float] | None
    start_level: float
    end_level: float
    drift_ratio: float | None
    blocks: tuple[Block, ...]
    change_points: tuple[int, ...]
    projection: Projection | None = None


def points(steps: ArrayLike, values: ArrayLike) -> Points:
    """Finite readings in step order; of a repeated step the last reading given counts (a resumed run)."""
    t, y = np.atleast_1d(np.asarray(steps)), np.atleast_1d(np.asarray(values, dtype=np.float64))
    if t.shape != y.shape or t.ndim != 1:
        raise ValueError(f"steps and values must be lists of one length, got {t.shape} and {y.shape}")
    kept = np.isfinite(y)
    order = np.argsort(t[kept], kind="stable")
    t, y = t[kept][order].astype(np.int64), y[kept][order]
    last_of_step = np.append(t[1:] != t[:-1], True) if len(t) else np.zeros(0, dtype=bool)
    return Points(t[last_of_step], y[last_of_step], int(len(kept) - last_of_step.sum()))


def describe(series: Points, bound: float | None = None) -> Statistics:
    """All statistics of one series (1 or more readings); with `bound` also when it is reached."""
    if len(series) == 0:
        raise ValueError("a series must have at least one finite reading, got none")
    steps, values = series.steps, series.values
    n = len(series)
    line = fit_trend(steps, values) if n >= MIN_POINTS else None
    curve = fit_trend(steps, values, degree=2) if n >= MIN_POINTS else None
    ols, error, lags = newey_west_slope(steps, values) if n >= 3 else (None, None, None)
    start, end, ratio = drift(values)
    return Statistics(
        num_readings=n,
        num_left_out=series.num_left_out,
        first=int(steps[0]),
        last=int(steps[-1]),
        ols_slope=ols,
        newey_west_error=error,
        newey_west_lags=lags,
        slope=line.slope() if line else None,
        acceleration=curve.acceleration() if curve else None,
        autocorrelation=residual_autocorrelation(series) if n >= MIN_POINTS else None,
        theil_sen=theil_sen(steps, values) if n >= 3 else None,
        mann_kendall=mann_kendall(steps, values) if n >= 3 else None,
        start_level=start,
        end_level=end,
        drift_ratio=ratio,
        blocks=blocks(series),
        change_points=change_points(series),
        projection=project(series, bound) if bound is not None and n >= MIN_POINTS else None,
    )


def newey_west_slope(
    steps: NDArray[np.int64], values: NDArray[np.float64], lags: int | None = None
) -> tuple[float, float, int]:
    """OLS slope a step, its Newey-West (1987) standard error, and the lags used (Bartlett weights).

    lags = floor(4 (n / 100)^(2/9)), Newey and West (1994). Given for comparison with other tools only: under
    AR(1) 0.9 it rejects a true slope far too often, so that no verdict uses it.
    """
    from statsmodels.regression.linear_model import OLS

    n = len(values)
    lags = int(4 * (n / 100) ** (2 / 9)) if lags is None else lags
    x = steps - steps.mean()
    fit = OLS(values, np.stack([np.ones(n), x], axis=1)).fit(cov_type="HAC", cov_kwds={"maxlags": lags})
    return float(fit.params[1]), float(np.sqrt(max(0.0, fit.cov_params()[1, 1]))), lags


def theil_sen(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median of the slopes of all pairs, and its interval for independent readings (Sen, 1968)."""
    thin = -(-len(values) // MAX_PAIRWISE)
    slope, _, low, high = stats.theilslopes(values[::thin], steps[::thin], alpha=CONFIDENCE)
    return float(slope), float(low), float(high)


def mann_kendall(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Kendall's tau of value and step, and the p value of no trend FOR INDEPENDENT readings (Mann, 1945).

    None of a constant series. Under positive autocorrelation the p value is far too small.
    """
    if np.ptp(values) == 0:
        return None
    found = stats.kendalltau(steps, values)
    return float(found.statistic), float(found.pvalue)


def drift(values: NDArray[np.float64]) -> tuple[float, float, float | None]:
    """Mean of the first 5% of the readings, of the last 5%, and last over first (None over 0)."""
    share = max(1, -(-len(values) // 20))
    start, end = float(values[:share].mean()), float(values[-share:].mean())
    return start, end, end / start if start != 0 else None


def blocks(series: Points, block_steps: int = BLOCK_STEPS) -> tuple[Block, ...]:
    """Median and maximum of each `block_steps` steps from the first one on; empty stretches are left out."""
    first = int(series.steps[0])
    edges = np.flatnonzero(np.diff((series.steps - first) // block_steps)) + 1
    found = []
    for part, values in zip(np.split(series.steps, edges), np.split(series.values, edges), strict=True):
        begin = first + int(part[0] - first) // block_steps * block_steps
        end = min(begin + block_steps - 1, int(series.steps[-1]))
        found.append(Block(begin, end, len(values), float(np.median(values)), float(values.max())))
    return tuple(found)


def change_points(series: Points) -> tuple[int, ...]:
    """First steps of the new level after each shift, by CHANGE_RULE."""
    critical = float(stats.kstwobign.isf(CHANGE_LEVEL))
    values = despike(series.values)[0]
    found, open_stretches = [], [(0, len(values))]
    while open_stretches:
        low, high = open_stretches.pop()
        split = _strongest_shift(values[low:high], critical)
        if split is not None:
            found.append(int(series.steps[low + split]))
            open_stretches += [(low, low + split), (low + split, high)]
    return tuple(sorted(found))


def _strongest_shift(values: NDArray[np.float64], critical: float) -> int | None:
    n = len(values)
    if n < 2 * MIN_SEGMENT:
        return None
    deviation = np.abs(np.cumsum(values - values.mean()))[MIN_SEGMENT - 1 : n - MIN_SEGMENT]
    split = int(np.argmax(deviation)) + MIN_SEGMENT
    residuals = np.r_[values[:split] - values[:split].mean(), values[split:] - values[split:].mean()]
    variance, _ = long_run_variance(residuals, num_terms=2)
    return split if float(deviation.max()) > critical * np.sqrt(n * variance) + 1e-12 * n else None


def despike(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Isolated spikes drawn back to 6 robust deviations from the running median of 11, and their number.

    The deviation is 1.4826 times the median distance from the running median (1.2533 times the mean one where
    over half are 0). Whatever lasts 6 readings or more moves the running median and stays as it is.
    """
    if len(values) < SPIKE_WINDOW:
        return values, 0
    middle = ndimage.median_filter(values, SPIKE_WINDOW, mode="nearest")
    distance = np.abs(values - middle)
    deviation = 1.4826 * float(np.median(distance)) or 1.2533 * float(distance.mean())
    reach = SPIKE_DEVIATIONS * deviation
    return np.clip(values, middle - reach, middle + reach), int((distance > reach).sum())


def residual_autocorrelation(series: Points) -> float:
    """Lag-1 autocorrelation about the fitted parabola, corrected for the fit's bias, held to 0..0.97."""
    fitted, _ = fit_trend(series.steps, series.values, degree=2).values_at(series.steps)
    return lag_one(series.values - fitted, num_terms=3)


def project(series: Points, bound: float) -> Projection:
    """Where the fitted line, or the parabola if its curvature is beyond doubt, reaches `bound`.

    The interval of the step: where the curve's own upper and lower limit reach it (Fieller's way of inverting
    the interval of a mean). It assumes that the curve goes on as it is, which is a reading, not a promise.
    """
    curve = fit_trend(series.steps, series.values, degree=2)
    low, high = curve.acceleration().interval(CONFIDENCE)
    bent = low > 0 or high < 0
    fit: TrendFit = curve if bent else fit_trend(series.steps, series.values)
    first, last = int(series.steps[0]), int(series.steps[-1])
    horizon = last + HORIZON_WINDOWS * (last - first)
    grid = np.linspace(first, horizon, min(MAX_GRID, horizon - first + 1))
    level, error = fit.values_at(grid)
    reach = Estimate(0.0, 1.0, fit.dof).interval(CONFIDENCE)[1] * error
    sign = 1.0 if bound > level[0] else -1.0

    def reached(curve: NDArray[np.float64]) -> float | None:
        at = np.flatnonzero(sign * (curve - bound) >= 0)
        return float(grid[at[0]]) if len(at) else None

    return Projection(
        bound=bound,
        crossing=reached(level),
        earliest=reached(level + sign * reach),
        latest=reached(level - sign * reach),
        horizon=horizon,
        degree=2 if bent else 1,
    )
