"""Progress of one or several runs on stderr: bars on a terminal, plain lines anywhere else.

Nothing is ever written to stdout, which belongs to results.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from thinwire.train.streams import forgiving

LINE_SECONDS = 5.0
"""Least seconds between two plain lines of one run."""

_PACE_STEPS = 20
"""Steps over which seconds a step are averaged."""


class Observer(Protocol):
    """What a training loop tells about itself while it runs."""

    def start(self, name: str, first_step: int, last_step: int) -> None:
        """The run `name` is about to take steps first_step..last_step."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` is done; `metrics` is its line of metrics.jsonl."""
        ...

    def message(self, text: str) -> None:
        """One line worth reading now."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended with this summary."""
        ...


class Display(Protocol):
    """Where the observers of one or several runs show themselves; entered once around all of them."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def observer(self) -> Observer:
        """A new observer for one run."""
        ...


class NullObserver:
    """Shows nothing."""

    def start(self, name: str, first_step: int, last_step: int) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


def make_display(stream: TextIO | None = None) -> Display:
    """Bars when the stream (default stderr) is a terminal that can redraw a line, plain lines otherwise.

    A stream that cannot be written any more shows nothing; the run goes on.
    """
    stream = forgiving(stream or sys.stderr)
    console = Console(file=stream)
    return (
        BarDisplay(console) if console.is_terminal and not console.is_dumb_terminal else LineDisplay(stream)
    )


class Pace:
    """Seconds a step over the last 20 steps (validation included), and the seconds left at that pace."""

    def __init__(self, last_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._last_step, self._clock = last_step, clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)

    def tick(self, step: int, step_seconds: float) -> tuple[float, float]:
        """(seconds a step, seconds left) now that `step` is done; the first one stands for itself."""
        self._marks.append((step, self._clock()))
        (old_step, old_time), (new_step, new_time) = self._marks[0], self._marks[-1]
        seconds = (new_time - old_time) / (new_step - old_step) if new_step > old_step else step_seconds
        return seconds, seconds * (self._last_step - step)


class LineDisplay:
    """Plain lines of any number of runs."""

    def __init__(
        self, stream: TextIO, every_seconds: float = LINE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._every_seconds, self._clock = stream, every_seconds, clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def observer(self) -> "LineObserver":
        return LineObserver(self._stream, self._every_seconds, self._clock)


class LineObserver:
    """At most one line every `every_seconds`, and always the first and the last step."""

    def __init__(self, stream: TextIO, every_seconds: float, clock: Callable[[], float]) -> None:
        self._stream, self._every_seconds, self._clock = stream, every_seconds, clock
        self._name, self._last_step = "run", 0
        self._pace = Pace(0, clock)
        self._printed_at: float | None = None
        self._held_back: str | None = None

    def start(self, name: str, first_step: int, last_step: int) -> None:
        self._name, self._last_step = name, last_step
        self._pace = Pace(last_step, self._clock)
        self._printed_at = self._held_back = None
        self._print(f"{name}: steps {first_step} to {last_step}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds, left = self._pace.tick(step, metrics.get("timing_s/step", 0.0))
        line = f"{self._name}: step {step}/{self._last_step}  {readings(metrics)}  {pace_text(seconds, left)}"
        now = self._clock()
        first = self._printed_at is None
        if first or step == self._last_step or now - (self._printed_at or 0.0) >= self._every_seconds:
            self._print(line)
            self._printed_at, self._held_back = now, None
        else:
            self._held_back = line

    def message(self, text: str) -> None:
        self._print(f"{self._name}: {text}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._held_back is not None:
            self._print(self._held_back)
            self._held_back = None
        self._print(f"{self._name}: {finish_text(summary)}")

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class BarDisplay:
    """One redrawn bar a run."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[readings]}", markup=False),
            TextColumn("{task.fields[pace]}", markup=False),
            console=console,
            redirect_stdout=False,  # rich would move what is printed there to stderr
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def observer(self) -> "BarObserver":
        return BarObserver(self._progress)


class BarObserver:
    """One bar with step, score, gap, seconds a step and time left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=1, readings="", pace="", start=False, visible=False)
        self._name, self._pace = "run", Pace(0)

    def start(self, name: str, first_step: int, last_step: int) -> None:
        self._name, self._pace = name, Pace(last_step)
        self._progress.start_task(self._task)
        self._progress.update(
            self._task, description=name, completed=first_step - 1, total=last_step, visible=True
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        text = pace_text(*self._pace.tick(step, metrics.get("timing_s/step", 0.0)))
        self._progress.update(self._task, completed=step, readings=readings(metrics), pace=text)

    def message(self, text: str) -> None:
        self._progress.console.print(f"{self._name}: {text}", markup=False, highlight=False)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._progress.update(self._task, pace=str(summary.get("status", "done")))


def readings(metrics: Mapping[str, float]) -> str:
    """Score and gap of a step, and the validation where it was measured."""
    parts = [
        f"{label} {metrics[key]:.3f}{unit}"
        for label, key, unit in (
            ("score", "critic/score/mean", ""),
            ("gap", "rollout_corr/kl", " nats"),
            ("validation", "val/score", ""),
        )
        if key in metrics
    ]
    return "  ".join(parts)


def pace_text(seconds: float, left: float) -> str:
    """Seconds a step and the time left."""
    return f"{seconds:.2f} s/step  {duration(left)} left"


def finish_text(summary: Mapping[str, Any]) -> str:
    """How a run ended: status, steps, seconds, first and last validation."""
    text = f"{summary.get('status', 'done')} after {summary.get('steps', 0)} steps"
    if summary.get("seconds") is not None:
        text += f", {duration(float(summary['seconds']))}"
    validation = summary.get("validation") or {}
    if validation.get("first") is not None and validation.get("last") is not None:
        text += f", validation {validation['first']:.3f} -> {validation['last']:.3f}"
    return text


def duration(seconds: float) -> str:
    """Seconds as 42s, 3m 05s or 2h 07m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
