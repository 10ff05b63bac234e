"""Summaries of runs and comparisons: pure functions of the lines of metrics.jsonl."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

AT_SERIES = {
    "reference_kl": "actor/kl_loss",
    "gap": "rollout_corr/kl",
    "entropy": "actor/entropy",
    "clip_fraction": "actor/pg_clipfrac",
    "dual_clip_fraction": "actor/pg_clipfrac_lower",
}
"""Summary name -> series key of the readings taken at single steps. reference_kl and entropy are seen
through the codec: readings of the lens."""

WIRE_SERIES = ("wire/forward_bytes", "wire/backward_bytes", "wire/anchor_bytes", "wire/side_channel_bytes")

Rows = Sequence[Mapping[str, Any]]


def run_summary(
    rows: Rows,
    name: str,
    arm: str | None,
    seed: int,
    status: str,
    seconds: float,
    at_steps: Iterable[int] | None = None,
) -> dict[str, Any]:
    """One run in numbers. `rows` are its metrics by rising step; readings not taken are None.

    `at` holds the readings of single steps (default: the quarter marks of the steps done, and the last);
    gap_slope there is `slope_over_last_half`; wire_bytes is what that step sent over all boundaries,
    anchor and side channel included. wire.bytes_per_step is the mean over the run's steps.
    """
    taken = [row for row in rows if int(row["step"]) >= 1]
    last_step = int(taken[-1]["step"]) if taken else 0
    asked = quarter_marks(last_step) if at_steps is None else sorted(set(at_steps))
    validation = [value for row in rows if (value := _finite(row.get("val/score"))) is not None]
    scores = [_finite(row.get("critic/score/mean")) for row in taken]
    return {
        "name": name,
        "arm": arm,
        "seed": seed,
        "status": status,
        "steps": last_step,
        "score": {"first": scores[0] if scores else None, "last": scores[-1] if scores else None},
        "validation": {
            "first": validation[0] if validation else None,
            "last": validation[-1] if validation else None,
            "best": max(validation, default=None),
        },
        "wire": {
            "bytes_per_step": _mean([wire_bytes(row) for row in taken]),
            "dense_bytes_per_step": _mean([_finite(row.get("wire/dense_bytes")) for row in taken]),
        },
        "at": {str(row["step"]): _at(taken, row) for row in taken if int(row["step"]) in asked},
        "seconds": seconds,
    }


def quarter_marks(last_step: int) -> list[int]:
    """ceil(q last / 4) for q = 1..4, without repeats."""
    return sorted({math.ceil(quarter * last_step / 4) for quarter in range(1, 5)} - {0})


def slope_over_last_half(rows: Rows, key: str, last_step: int) -> float | None:
    """OLS slope of a series, units a step, over the steps s with last_step / 2 < s <= last_step.

    None with fewer than two finite readings at different steps there.
    """
    points = [
        (float(row["step"]), value)
        for row in rows
        if last_step / 2 < row["step"] <= last_step and (value := _finite(row.get(key))) is not None
    ]
    if len({step for step, _ in points}) < 2:
        return None
    return float(stats.linregress(*zip(*points, strict=True)).slope)


def wire_bytes(row: Mapping[str, Any]) -> float | None:
    """Bytes of one step: forward + backward + anchor + side channel; None if nothing was counted."""
    parts = [_finite(row.get(key)) for key in WIRE_SERIES]
    return sum(part or 0.0 for part in parts) if any(part is not None for part in parts) else None


def _at(rows: Rows, row: Mapping[str, Any]) -> dict[str, float | None]:
    readings = {name: _finite(row.get(key)) for name, key in AT_SERIES.items()}
    slope = slope_over_last_half(rows, AT_SERIES["gap"], int(row["step"]))
    return readings | {"gap_slope": slope, "wire_bytes": wire_bytes(row)}


def compare_summary(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arms x seeds in numbers: every run's summary, and per arm the means over the seeds that are done.

    {"name", "status", "arms": {arm: {"status", "seeds": {seed: run summary}, "mean": {...}}}}; each mean
    is {"mean", "std" (n - 1; None for one seed), "n"}; gap_slope has also "low" and "high", the 95%
    t interval over the seeds' slopes. A comparison or an arm is done only if all its runs are.
    """
    arms: dict[str, Any] = {}
    for arm in dict.fromkeys(str(run["arm"]) for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        done = [run for run in own if run["status"] == "done"]
        arms[arm] = {
            "status": worst_status(run["status"] for run in own),
            "seeds": {str(run["seed"]): dict(run) for run in own},
            "mean": _means(done),
        }
    return {"name": name, "status": worst_status(run["status"] for run in runs), "arms": arms}


def worst_status(statuses: Iterable[str]) -> str:
    """failed before interrupted before done."""
    present = set(statuses)
    return next((status for status in ("failed", "interrupted") if status in present), "done")


def _means(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means: dict[str, Any] = {
        table: {key: spread([run[table][key] for run in runs]) for key in keys}
        for table, keys in (
            ("score", ("first", "last")),
            ("validation", ("first", "last", "best")),
            ("wire", ("bytes_per_step", "dense_bytes_per_step")),
        )
    }
    shared = [step for step in (runs[0]["at"] if runs else {}) if all(step in run["at"] for run in runs)]
    means["at"] = {step: _at_means([run["at"][step] for run in runs]) for step in shared}
    means["seconds"] = spread([run["seconds"] for run in runs])
    return means


def _at_means(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means: dict[str, Any] = {key: spread([reading[key] for reading in readings]) for key in readings[0]}
    means["gap_slope"] |= interval([reading["gap_slope"] for reading in readings])
    return means


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, sample standard deviation (n - 1) and number of the values that were measured."""
    found = np.array([value for value in values if value is not None], dtype=np.float64)
    return {
        "mean": float(found.mean()) if len(found) else None,
        "std": float(found.std(ddof=1)) if len(found) > 1 else None,
        "n": len(found),
    }


def interval(values: Sequence[float | None], level: float = 0.95) -> dict[str, float | None]:
    """The t interval mean +- t_(n-1) std / sqrt(n); None for fewer than two values."""
    found = np.array([value for value in values if value is not None], dtype=np.float64)
    if len(found) < 2:
        return {"low": None, "high": None}
    error = float(found.std(ddof=1)) / math.sqrt(len(found))
    margin = float(stats.t.ppf((1 + level) / 2, len(found) - 1)) * error
    return {"low": float(found.mean()) - margin, "high": float(found.mean()) + margin}


def step_table(summary: Mapping[str, Any]) -> list[list[str]]:
    """The last step of every arm as text cells, a header row first: means over the seeds that are done."""
    header = ["arm", "seeds", "validation", "reference KL (lens)", "gap, nats", "gap slope, nats/step",
              "entropy (lens)", "clipped", "wire, bytes/step"]  # fmt: skip
    table = [header]
    for arm, entry in summary["arms"].items():
        mean = entry["mean"]
        at = mean["at"][max(mean["at"], key=int)] if mean["at"] else {}
        first, last = mean["validation"]["first"]["mean"], mean["validation"]["last"]["mean"]
        cells = [
            f"{_cell(first, '.3f')} -> {_cell(last, '.3f')}",
            *(_cell(at.get(key, {}).get("mean"), form) for key, form in (
                ("reference_kl", ".3f"), ("gap", ".3f"), ("gap_slope", "+.5f"), ("entropy", ".3f"),
                ("clip_fraction", ".2%"))),
            _cell(mean["wire"]["bytes_per_step"]["mean"], ",.0f"),
        ]  # fmt: skip
        num_done = sum(run["status"] == "done" for run in entry["seeds"].values())
        label = f"{num_done}/{len(entry['seeds'])}" + (
            "" if entry["status"] == "done" else f" {entry['status']}"
        )
        table.append([arm, label, *cells])
    return table


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    mean: float | None = spread(values)["mean"]
    return mean
