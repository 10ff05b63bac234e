"""Numbers read off series: the score cliff, the failure span, the gap slope and the step table.

The span is a mark on a picture, found by a printed rule. No verdict may rest on it: the trough that ends
it is a codec-view reading, a reading of the lens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.instruments.cliff import CLIFF_RULE as SCORE_CLIFF_RULE
from thinwire.instruments.cliff import WINDOW, Cliff, score_cliff, trough
from thinwire.reports.load import WIRE_PARTS, Run, Series, arm_names

CLIFF_RULE = (
    f"{SCORE_CLIFF_RULE} "
    f"The shaded span ends at the lowest {WINDOW}-step mean of the codec-view entropy after the cliff."
)
# Table column -> the series it reads, at exactly the step asked for.
TABLE_SERIES = {
    "score": "critic/score/mean",
    "reference_kl": "actor/kl_loss",
    "gap": "rollout_corr/kl",
    "entropy": "actor/entropy",
    "clip_fraction": "actor/pg_clipfrac",
    "dual_clip_fraction": "actor/pg_clipfrac_lower",
    "kl_dense": "probe/kl_dense",
    "entropy_dense": "probe/entropy_dense",
}


@dataclass(frozen=True)
class Span:
    """From the score cliff (`first`) to the trough of the codec-view entropy (`last`)."""

    first: int
    last: int
    cliff: Cliff


def failure_span(score: Series, entropy: Series) -> Span | None:
    """From the first score cliff to the trough of the 10-step mean of the entropy after it.

    Where the entropy has no ten finite readings up to some step past the cliff the span ends at the score's
    last step.
    """
    cliff = score_cliff(score.steps, score.values)
    if cliff is None:
        return None
    lowest = trough(entropy.steps, entropy.values, cliff.step)
    return Span(cliff.step, lowest[0] if lowest else int(score.steps[-1]), cliff)


def run_span(run: Run) -> Span | None:
    """The failure span of one run; the dense control has a score too and is marked by the same rule."""
    return failure_span(run.get("critic/score/mean"), run.get("actor/entropy"))


def ols_slope(series: Series) -> float | None:
    """slope = sum((t - mean t)(y - mean y)) / sum((t - mean t)^2), y a step, over finite readings."""
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    if len(steps) < 2:
        return None
    centred = steps - steps.mean()
    return float(centred @ (values - values.mean()) / (centred @ centred))


def gap_slope(run: Run, step: int) -> float | None:
    """OLS slope of the gap over the last half of steps 1..step, over step//2 + 1..step; nats a step."""
    gap = run.get("rollout_corr/kl")
    return ols_slope(gap.between(step // 2 + 1, step)) if gap.at(step) is not None else None


def default_steps(runs: Sequence[Run]) -> list[int]:
    """Step 1, the middle one, the last that every run has, and the last of all; 0 before the first step."""
    lengths = [run.last_step for run in runs if run.last_step > 0]
    if not lengths:
        return [0]
    common = min(lengths)
    return sorted({1, max(1, common // 2), common, max(lengths)})


def step_table(runs: Sequence[Run], steps: Sequence[int]) -> list[dict[str, Any]]:
    """One row per step and arm, JSON-ready: every column {"mean", "spread", "values"} over the arm's seeds.

    spread = sample standard deviation (n - 1) over seeds, None for one seed. `values` maps a seed to its
    reading; a seed without a reading at that step is absent, one that is not a finite number reads None and
    makes the mean None. validation_first/_last: the first and the latest reading up to the step, of the runs
    that reached it.
    """
    return [_row(step, arm, [r for r in runs if r.arm == arm]) for step in steps for arm in arm_names(runs)]


def _row(step: int, arm: str, runs: Sequence[Run]) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "arm": arm, "seeds": [run.seed for run in runs]}
    for column, key in TABLE_SERIES.items():
        row[column] = _over_seeds({run.seed: run.get(key).at(step) for run in runs})
    row["gap_slope"] = _over_seeds({run.seed: gap_slope(run, step) for run in runs})
    row["wire_bytes"] = _over_seeds({run.seed: _wire_bytes(run, step) for run in runs})
    reached = [run for run in runs if run.last_step >= step]
    validation = {run.seed: run.get("val/score").between(0, step) for run in reached}
    for name, index in (("validation_first", 0), ("validation_last", -1)):
        row[name] = _over_seeds(
            {s: float(v.values[index]) if len(v) else None for s, v in validation.items()}
        )
    return row


def _over_seeds(readings: dict[int, float | None]) -> dict[str, Any]:
    measured = {seed: value for seed, value in readings.items() if value is not None}
    finite = [value for value in measured.values() if math.isfinite(value)]
    complete = bool(finite) and len(finite) == len(measured)
    return {
        "mean": float(np.mean(finite)) if complete else None,
        "spread": float(np.std(finite, ddof=1)) if complete and len(finite) > 1 else None,
        "values": {str(s): v if math.isfinite(v) else None for s, v in measured.items()},
    }


def _wire_bytes(run: Run, step: int) -> float | None:
    """Bytes of one step: forward + backward, and anchor and side channel where the step had any."""
    if run.get("wire/forward_bytes").at(step) is None:
        return None
    return sum(run.get(f"wire/{part}_bytes").at(step) or 0.0 for part in WIRE_PARTS)
