"""What a live view tells of a run, as values: readings, progress, wire, events, verdict."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.reports.follow import Look, Status
from thinwire.reports.load import Run, WireTotals
from thinwire.reports.readings import Series
from thinwire.reports.sparkline import byte_count, number, plain, span

SHOWN: tuple[tuple[str, str, int], ...] = (
    ("score", "critic/score/mean", 1),
    ("validation", "val/score", 2),
    ("gap", "rollout_corr/kl", 0),
    ("dense KL", "probe/kl_dense", 4),
    ("entropy, dense", "probe/entropy_dense", 6),
    ("entropy, lens", "actor/entropy", 7),
    ("grad norm", "actor/grad_norm", 3),
    ("clipped", "actor/pg_clipfrac", 5),
    ("dual-clipped", "actor/pg_clipfrac_lower", 8),
)
"""Label, series and rank of what is shown; where lines are few those of the lowest ranks stay. The lens is
the codec's view: its entropy is no reading of the policy."""

PACE_STEPS = 20
"""Steps over which seconds a step are averaged."""

Verdict = Callable[[Run], str]


@dataclass(frozen=True)
class Reading:
    """A series in three numbers. `change` is its newest tenth (1 to 20 readings) less its oldest, both as
    means of the finite ones; None below two readings."""

    label: str
    key: str
    series: Series
    last: float | None
    change: float | None


@dataclass(frozen=True)
class RunView:
    """One run as shown."""

    run: Run
    status: Status
    step: int
    num_steps: int | None
    seconds_per_step: float | None
    seconds_silent: float | None
    """Since the last line of metrics.jsonl."""
    readings: tuple[Reading, ...]
    wire: WireTotals | None
    events: tuple[dict[str, Any], ...]
    sample: dict[str, Any] | None
    verdict: str

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None where it cannot be told or the run does not run."""
        if (
            self.num_steps is None
            or self.seconds_per_step is None
            or self.status not in ("running", "unknown")
        ):
            return None
        return max(0, self.num_steps - self.step) * self.seconds_per_step

    def reading(self, label: str) -> Reading:
        return next(reading for reading in self.readings if reading.label == label)


def view(look: Look, verdict: str = "", now: Callable[[], float] = time.time) -> RunView:
    """What is shown of a run at one look."""
    run = look.run
    steps = run.config.get("steps")
    return RunView(
        run=run,
        status=look.status,
        step=run.last_step,
        num_steps=steps if isinstance(steps, int) and not isinstance(steps, bool) else None,
        seconds_per_step=_pace(run),
        seconds_silent=_silence(run, now()),
        readings=tuple(_reading(run, label, key) for label, key, _ in SHOWN),
        wire=run.wire_totals(),
        events=look.events,
        sample=look.sample,
        verdict=verdict,
    )


class Verdicts:
    """A run's verdict, asked for again only when the run has moved on.

    The seam that keeps a view alive: a verdict that raises is shown as its error.
    """

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._known: dict[str, tuple[tuple[int, ...], str]] = {}

    def of(self, run: Run) -> str:
        at = (run.last_step, *(len(run.get(key)) for _, key, _ in SHOWN))
        known = self._known.get(str(run.path))
        if known is None or known[0] != at:
            known = (at, self._ask(run))
            self._known[str(run.path)] = known
        return known[1]

    def _ask(self, run: Run) -> str:
        try:
            return self._verdict(run)
        except Exception as error:
            return f"none: {type(error).__name__}: {error}"


def _reading(run: Run, label: str, key: str) -> Reading:
    series = run.get(key)
    last = float(series.values[-1]) if len(series) else None
    return Reading(label, key, series, last, change(series))


def change(series: Series) -> float | None:
    """Mean of the newest tenth of the finite readings (1 to 20 of them) less that of the oldest tenth."""
    finite = series.values[np.isfinite(series.values)]
    if len(finite) < 2:
        return None
    num = min(20, max(1, len(finite) // 10))
    return float(finite[-num:].mean() - finite[:num].mean())


def _pace(run: Run) -> float | None:
    """Seconds a step over the last steps, validation included."""
    first = run.last_step - PACE_STEPS + 1
    steps = run.get("timing_s/step").between(max(1, first), run.last_step).values
    validation = run.get("timing_s/validation").between(max(1, first), run.last_step).values
    if len(steps) == 0:
        return None
    seconds = float(steps.mean() + validation.sum() / len(steps))
    return seconds if math.isfinite(seconds) else None


def _silence(run: Run, now: float) -> float | None:
    try:
        return max(0.0, now - (run.path / "metrics.jsonl").stat().st_mtime)
    except OSError:
        return None


def event_text(event: Mapping[str, Any]) -> str:
    """One event of events.jsonl on one line; an unknown kind shows all it holds."""
    kind, reason = event.get("event"), event.get("reason", "")
    if kind == "controller":
        moved = f"{event.get('actuator')} {_short(event.get('from'))} -> {_short(event.get('to'))}"
        text = f"controller: {moved}: {reason}"
    elif kind == "non_finite":
        text = f"not finite: {event.get('series')}"
    elif kind == "stopped":
        text = f"stopped by the controller: {reason}"
    elif kind == "resumed":
        damaged = event.get("damaged")
        text = "resumed" + (f", set aside: {damaged}" if damaged else "")
    else:
        rest = {key: value for key, value in event.items() if key not in ("step", "event")}
        text = f"{kind}: {json.dumps(rest)}"
    return plain(f"step {event.get('step', '?')} {text}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def wire_text(wire: WireTotals | None) -> str:
    """Bytes sent so far against dense, and the parts that are not the codec's own."""
    if wire is None:
        return "nothing counted yet"
    share = wire.share_of_dense(wire.sent_bytes)
    text = byte_count(wire.sent_bytes)
    if share is not None and wire.dense_bytes is not None:
        text += f", {share:.2%} of dense {byte_count(wire.dense_bytes)}"
    rest = [f"{name.replace('_', ' ')} {byte_count(wire.parts[name])}" for name in ("anchor", "side_channel")]
    return f"{text}  ({', '.join(rest)})"


def as_object(shown: RunView) -> dict[str, Any]:
    """The view as JSON: no NaN (null stands for it), no text that acts on a terminal."""
    wire = shown.wire
    return {
        "path": str(shown.run.path),
        "arm": plain(shown.run.arm),
        "seed": shown.run.seed,
        "status": shown.status,
        "step": shown.step,
        "steps": shown.num_steps,
        "seconds_per_step": shown.seconds_per_step,
        "seconds_left": shown.seconds_left,
        "seconds_silent": shown.seconds_silent,
        "series": {reading.key: _series_object(reading) for reading in shown.readings if len(reading.series)},
        "wire": None
        if wire is None
        else {
            "sent_bytes": _finite(wire.sent_bytes),
            "dense_bytes": _finite(wire.dense_bytes),
            "share_of_dense": _finite(wire.share_of_dense(wire.sent_bytes)),
            **{f"{part}_bytes": _finite(num_bytes) for part, num_bytes in wire.parts.items()},
        },
        "events": [event_text(event) for event in shown.events[-10:]],
        "verdict": plain(shown.verdict) or None,
        "notes": [plain(note) for note in shown.run.notes],
    }


def _series_object(reading: Reading) -> dict[str, Any]:
    values = reading.series.values
    return {
        "step": int(reading.series.steps[-1]),
        "last": _finite(reading.last),
        "text": number(reading.last),
        "change": _finite(reading.change),
        "readings": len(values),
        "not_finite": int((~np.isfinite(values)).sum()),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def is_finished(shown: RunView) -> bool:
    """Whether nothing more is to come: the run has a summary and no process holds it."""
    return shown.status in ("done", "failed", "interrupted")


def progress_text(shown: RunView) -> str:
    """Step, pace and time left in words."""
    parts = [f"step {shown.step}" + (f"/{shown.num_steps}" if shown.num_steps else "")]
    if shown.seconds_per_step is not None:
        parts.append(f"{number(shown.seconds_per_step)} s/step")
    if shown.seconds_left is not None:
        parts.append(f"{span(shown.seconds_left)} left")
    return "  ".join(parts)
