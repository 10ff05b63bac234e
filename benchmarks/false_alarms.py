"""How often `thinwire analyze` calls a stationary run drifting, and a drifting one not.

Synthetic runs: gap = level 3 plus noise of standard deviation 0.3, gradient norm = 1.7 plus noise of
0.2, score = 256 binomial answers from 0.5 to 0.8. The noise of both is AR(1) of the correlation named.
Per row: the share of each verdict over the seeds, and of the gap alone the share whose 99% interval of
the slope excludes 0, by the interval the verdict uses and by plain Newey-West (statsmodels, its
automatic lags). `--slope` stays at its default. DRIFTING and ACCELERATING both count as alarms. One JSON
object on standard output.

    python benchmarks/false_alarms.py [--seeds 1000] [--power-seeds 300]
"""

import argparse
import collections
import json
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.signal import lfilter

from thinwire.instruments.stationarity import CONFIDENCE, newey_west_slope
from thinwire.instruments.trend import fit_trend
from thinwire.instruments.verdict import GAP, GRAD_NORM, SCORES, verdict

MAX_FALSE_ALARMS, MIN_POWER = 0.05, 0.9
NOISE, SLOPE = 0.3, 0.005
WARM_UP = 500
LEVEL_ROWS = [(600, 0.0), (600, 0.5), (600, 0.9), (600, 0.95), (200, 0.5), (200, 0.9), (100, 0.9)]
TREND_ROWS = [(100, 0.0), (200, 0.0), (200, 0.5), (200, 0.9), (300, 0.9), (600, 0.9)]


def autoregressive(rng: np.random.Generator, num_steps: int, correlation: float) -> NDArray[np.float64]:
    """AR(1) of variance 1."""
    shocks = rng.standard_normal(num_steps + WARM_UP)
    filtered: NDArray[np.float64] = lfilter([np.sqrt(1 - correlation**2)], [1, -correlation], shocks)
    return filtered[WARM_UP:]


def measure(num_steps: int, correlation: float, slope: float, num_seeds: int) -> dict[str, Any]:
    steps = np.arange(1, num_steps + 1)
    words: collections.Counter[str] = collections.Counter()
    robust = plain = 0
    for seed in range(num_seeds):
        rng = np.random.default_rng([seed, num_steps, round(100 * correlation)])
        gap = 3 + slope * steps + NOISE * autoregressive(rng, num_steps, correlation)
        norm = 1.7 + 0.2 * autoregressive(rng, num_steps, correlation)
        score = rng.binomial(256, 0.5 + 0.3 * steps / num_steps) / 256
        words[verdict({GAP: (steps, gap), GRAD_NORM: (steps, norm), SCORES[0]: (steps, score)}).word] += 1
        low, high = fit_trend(steps, gap).slope().interval(CONFIDENCE)
        robust += low > 0 or high < 0
        estimate, error, _ = newey_west_slope(steps, gap)
        plain += abs(estimate) > stats.norm.ppf((1 + CONFIDENCE) / 2) * error
    return {
        "steps": num_steps,
        "correlation": correlation,
        "slope": slope,
        "seeds": num_seeds,
        "alarms": (words["DRIFTING"] + words["ACCELERATING"]) / num_seeds,
        "words": dict(words),
        "slope_interval_excludes_0": robust / num_seeds,
        "plain_newey_west_excludes_0": plain / num_seeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--power-seeds", type=int, default=300)
    options = parser.parse_args()
    begin = time.process_time()
    level = [measure(steps, correlation, 0.0, options.seeds) for steps, correlation in LEVEL_ROWS]
    trend = [measure(steps, correlation, SLOPE, options.power_seeds) for steps, correlation in TREND_ROWS]
    goal = {
        "false_alarms": MAX_FALSE_ALARMS,
        "at": "600 steps, AR(1) 0.9",
        "power": MIN_POWER,
        "slope": SLOPE,
    }
    found = {"goal": goal, "noise": NOISE, "false_alarms": level, "power": trend}
    print(json.dumps(found | {"cpu_seconds": round(time.process_time() - begin, 1)}, indent=1))


if __name__ == "__main__":
    main()
