"""How often the controller touches runs that should be left alone: replays of recorded and resampled series.

Each run directory (stationary runs in which no setting moved: exact-k, dense) gives one replay as recorded
and an equal share of moving-block bootstrap replays: over the readings from step 1, the fitted line of every
series is kept, and its residuals are drawn in blocks of --block successive steps, the same blocks for all
series of a replay (Kuensch 1989), so that trend, autocorrelation and the ties between series survive. A
replay feeds `thinwire.control.decide` step by step with the run's own [controller] table, switched on, and
counts as touched if any step gives an event. One JSON object on standard output; the interval is
Clopper-Pearson, 95%.

    python benchmarks/controller_replay.py RUN... [--replays 200] [--block 25] [--seed 1]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from thinwire.codecs import Identity
from thinwire.control import ControllerConfig, ControlState, Plant, decide
from thinwire.control.controller import EXPONENT, GAP, GRAD_NORM
from thinwire.reports.load import Run, load_run
from thinwire.train.config import Recipe, load_recipe
from thinwire.train.losses import initial_settings

GOAL = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--block", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generator = np.random.default_rng(options.seed)
    whole, rest = divmod(options.replays, len(options.runs))
    rows = [
        replayed(folder, whole + (i < rest), options.block, generator)
        for i, folder in enumerate(options.runs)
    ]
    touched, replays = (sum(row[key] for row in rows) for key in ("touched", "replays"))
    interval = stats.binomtest(touched, replays).proportion_ci()
    share = touched / replays
    print(
        json.dumps(
            {
                "runs": rows,
                "block": options.block,
                "replays": replays,
                "touched": touched,
                "share": share,
                "interval": [interval.low, interval.high],
                "goal": GOAL,
                "goal_met": share <= GOAL,
            },
            indent=1,
        )
    )


def replayed(folder: Path, replays: int, block: int, generator: np.random.Generator) -> dict[str, Any]:
    """One run's replays: the recorded one first, then resampled ones."""
    run, recipe = load_run(folder), load_recipe(folder / "config.toml")
    config = recipe.controller.model_copy(update={"on": True})
    series = readings(run)
    num_steps = len(series[GAP])
    events = [first_event(config, plant(recipe, num_steps), series)]
    for _ in range(replays - 1):
        resampled = bootstrap(series, block, generator)
        events.append(first_event(config, plant(recipe, num_steps), resampled))
    reasons = [event for event in events if event is not None]
    return {
        "run": f"{run.arm}, seed {run.seed}",
        "steps": num_steps,
        "replays": replays,
        "recorded_touched": events[0] is not None,
        "touched": len(reasons),
        "first_reasons": reasons[:3],
    }


def plant(recipe: Recipe, num_steps: int) -> Plant:
    """What the controller could act on in this run."""
    codec = recipe.codec
    return Plant(
        num_steps,
        initial_settings(recipe.rl, recipe.anchor.cadence),
        compresses=not isinstance(codec, Identity),
        learns=codec.learns,
    )


def readings(run: Run) -> dict[str, NDArray[np.float64]]:
    """Aligned series of the run's steps 1..n; NaN where a step had no reading."""
    steps = run.get(GAP).between(1, run.last_step).steps
    found = {}
    for key in (GAP, GRAD_NORM, EXPONENT):
        values = [run.get(key).at(int(step)) for step in steps]
        found[key] = np.array([np.nan if value is None else value for value in values])
    return found


def bootstrap(
    series: dict[str, NDArray[np.float64]], block: int, generator: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """Line plus residuals in blocks drawn with replacement; readings stay absent where they were."""
    num_steps = len(series[GAP])
    starts = generator.integers(0, num_steps - block + 1, size=-(-num_steps // block))
    order = np.concatenate([np.arange(start, start + block) for start in starts])[:num_steps]
    resampled = {}
    for key, values in series.items():
        known = np.isfinite(values)
        if known.sum() < 2:
            resampled[key] = values
            continue
        steps = np.arange(num_steps)
        line = np.polyval(np.polyfit(steps[known], values[known], 1), steps)
        residual = np.where(known, values - line, 0.0)
        resampled[key] = np.where(known, line + residual[order], np.nan)
    return resampled


def first_event(
    config: ControllerConfig, own: Plant, series: dict[str, NDArray[np.float64]]
) -> dict[str, Any] | None:
    """The first event of a replay, None where the controller acts on nothing."""
    state = ControlState()
    for step in range(len(series[GAP])):
        row = {key: float(values[step]) for key, values in series.items() if np.isfinite(values[step])}
        decision = decide(config, own, state, row)
        state = decision.state
        if decision.events:
            return dict(decision.events[0])
    return None


if __name__ == "__main__":
    main()
