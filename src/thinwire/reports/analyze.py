"""What `thinwire analyze` finds in logs, as one JSON-ready value; its text is made in analyze_text."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.errors import UserError
from thinwire.core.records import SERIES
from thinwire.instruments.pooling import POOL_RULE, POOLED_CONFIDENCE, Difference, difference, pool
from thinwire.instruments.stationarity import CHANGE_RULE, CONFIDENCE, Points, Statistics, describe, points
from thinwire.instruments.trend import MIN_POINTS, Estimate, fit_trend
from thinwire.instruments.verdict import GAP, GAP_MAGNITUDE, GRAD_NORM, READ, SCORES, rule, verdict, worst
from thinwire.reports.load import Run, arm_names
from thinwire.reports.logs import read_logs

SHOWN = (*READ, "probe/kl_dense", "actor/kl_loss", "actor/entropy", "actor/pg_clipfrac")
LENS = {series.key for series in SERIES if series.view == "codec"} - {GRAD_NORM}
"""Readings through the codec: shown with that mark, read by no verdict."""


@dataclass(frozen=True)
class Request:
    """What was asked for: keys to show (none: SHOWN), steps to judge, the gap's bound and smallest slope."""

    series: tuple[str, ...] = ()
    window: tuple[int | None, int | None] = (None, None)
    bound: float | None = None
    slope: float | None = None


def analyze(paths: Sequence[Path | str], request: Request) -> dict[str, Any]:
    """Every run of `paths` with its statistics and verdict; two runs compared, seeds of an arm pooled."""
    _refuse(request)
    runs = [run for path in paths for run in read_logs(path)]
    _refuse_unknown_keys(request, runs)
    groups = _groups(runs)
    entries = [_run_entry(run, request) for run in runs]
    return {
        "runs": entries,
        "comparison": _comparison(runs, request) if len(runs) == 2 else None,
        "pooled": [
            _pooled(name, group, runs, entries, request) for name, group in groups.items() if len(group) > 1
        ],
        "window": list(request.window),
        "confidence": CONFIDENCE,
        "pooled_confidence": POOLED_CONFIDENCE,
        "rule": rule(request.slope),
        "change_rule": CHANGE_RULE,
        "pool_rule": POOL_RULE,
    }


def _refuse(request: Request) -> None:
    first, last = request.window
    if first is not None and last is not None and first > last:
        raise UserError(f"--window must be FIRST:LAST with FIRST <= LAST, got {first}:{last}; swap them")
    if request.slope is not None and not (request.slope > 0 and math.isfinite(request.slope)):
        raise UserError(f"--slope must be above 0 a step, got {request.slope}; leave it away for the default")
    if request.bound is not None and not math.isfinite(request.bound):
        raise UserError(
            f"--bound must be a finite number, got {request.bound}; give a gap in nats such as 20"
        )


def _refuse_unknown_keys(request: Request, runs: Sequence[Run]) -> None:
    known = sorted({key for run in runs for key in run.series})
    for key in request.series:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known[:12])} ..."
            raise UserError(f"--series {key} is in none of the logs; {hint}")


def _keys(run: Run, request: Request) -> list[str]:
    return [key for key in request.series or SHOWN if len(run.get(key))]


def _points(run: Run, key: str, request: Request) -> Points:
    series = run.get(key)
    first, last = request.window
    inside = series.between(
        int(series.steps[0]) if first is None else first, int(series.steps[-1]) if last is None else last
    )
    return points(inside.steps, inside.values)


def _run_entry(run: Run, request: Request) -> dict[str, Any]:
    found = {key: _points(run, key, request) for key in _keys(run, request)}
    if found and not any(len(series) for series in found.values()):
        window = ":".join("" if side is None else str(side) for side in request.window)
        steps = [int(step) for key in found for step in run.get(key).steps[[0, -1]]]
        raise UserError(
            f"--window {window} holds no finite reading of {run.path}, "
            f"which has steps {min(steps)}:{max(steps)}; give a part of them"
        )
    judged = verdict(
        {key: (series.steps, series.values) for key, series in run.series.items() if key in READ},
        slope=request.slope,
        window=request.window,
    )
    bounded = [key for key in (GAP, GAP_MAGNITUDE) if key in found][:1] or list(request.series)
    return {
        "path": str(run.path),
        "arm": run.arm,
        "seed": run.seed,
        "notes": list(run.notes),
        "missing": _missing(run),
        "available": sorted(run.series),
        "series": {
            key: _statistics(key, describe(series, request.bound if key in bounded else None))
            for key, series in found.items()
            if len(series)
        },
        "verdict": {
            "word": judged.word,
            "reasons": list(judged.reasons),
            "steps_needed": judged.steps_needed,
        },
    }


def _missing(run: Run) -> list[str]:
    """What a verdict needs and the log does not hold."""
    needed = [] if len(run.get(GAP)) or len(run.get(GAP_MAGNITUDE)) else [GAP]
    needed += [] if len(run.get(GRAD_NORM)) else [GRAD_NORM]
    return needed + ([] if any(len(run.get(key)) for key in SCORES) else [" or ".join(SCORES)])


def _statistics(key: str, found: Statistics) -> dict[str, Any]:
    blocks = [
        {"first": b.first, "last": b.last, "readings": b.num_readings, "median": b.median, "max": b.maximum}
        for b in found.blocks
    ]
    theil_sen, kendall, projected = found.theil_sen, found.mann_kendall, found.projection
    value = {
        "lens": key in LENS,
        "readings": found.num_readings,
        "not_finite": found.num_left_out,
        "first": found.first,
        "last": found.last,
        "start_level": found.start_level,
        "end_level": found.end_level,
        "drift_ratio": found.drift_ratio,
        "slope": _estimate(found.slope),
        "ols_slope": found.ols_slope,
        "newey_west_error": found.newey_west_error,
        "newey_west_lags": found.newey_west_lags,
        "acceleration": _estimate(found.acceleration),
        "autocorrelation": found.autocorrelation,
        "theil_sen": theil_sen and {"slope": theil_sen[0], "interval_if_independent": list(theil_sen[1:])},
        "mann_kendall": kendall and {"tau": kendall[0], "p_if_independent": kendall[1]},
        "change_points": list(found.change_points),
        "blocks": blocks,
        "projection": projected and dict(vars(projected)),
    }
    return {name: _json(item) for name, item in value.items()}


def _estimate(estimate: Estimate | None, confidence: float = CONFIDENCE) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {
        "value": _json(estimate.value),
        "standard_error": _json(estimate.standard_error),
        "dof": estimate.dof,
        "interval": [_json(limit) for limit in estimate.interval(confidence)],
    }


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by arm; three or more files whose arms are unknown are taken for seeds of one arm."""
    groups = {arm: [run for run in runs if run.arm == arm] for arm in arm_names(runs)}
    if len(runs) > 2 and len(groups) == len(runs) and not any(run.config for run in runs):
        return {"all runs": list(runs)}
    return groups


def _pooled(
    name: str,
    group: Sequence[Run],
    runs: Sequence[Run],
    entries: Sequence[Mapping[str, Any]],
    request: Request,
) -> dict[str, Any]:
    words = [entry["verdict"]["word"] for run, entry in zip(runs, entries, strict=True) if run in group]
    pooled = {}
    for key in dict.fromkeys(key for run in group for key in _keys(run, request)):
        series = [_points(run, key, request) for run in group if len(run.get(key))]
        slopes = [fit_trend(s.steps, s.values).slope() for s in series if len(s) >= MIN_POINTS]
        if len(slopes) > 1:
            found = pool(slopes)
            between = {"runs": found.num_runs, "between_deviation": _json(found.between_deviation)}
            pooled[key] = {
                **(_estimate(found.slope, POOLED_CONFIDENCE) or {}),
                **between,
                "lens": key in LENS,
            }
    return {
        "arm": name,
        "seeds": [run.seed for run in group],
        "words": words,
        "word": worst(words),
        "slopes": pooled,
    }


def _comparison(runs: Sequence[Run], request: Request) -> dict[str, Any]:
    """Second minus first at the steps both have."""
    first, second = runs
    keys = [key for key in _keys(first, request) if len(second.get(key))]
    found = {key: difference(_points(first, key, request), _points(second, key, request)) for key in keys}
    return {
        "first": {"path": str(first.path), "arm": first.arm, "seed": first.seed},
        "second": {"path": str(second.path), "arm": second.arm, "seed": second.seed},
        "series": {key: _difference(key, value) for key, value in found.items() if value is not None},
    }


def _difference(key: str, found: Difference) -> dict[str, Any]:
    return {
        "lens": key in LENS,
        "steps": found.num_steps,
        "first": found.first,
        "last": found.last,
        "mean": _json(found.mean),
        "mean_estimate": _estimate(found.mean_estimate),
        "slope": _estimate(found.slope),
        "crossing": found.crossing,
    }
