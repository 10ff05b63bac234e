"""Trackers: every line of metrics.jsonl also goes to TensorBoard, wandb or trackio, at no risk to the run.

Each tracker is a process of its own (train/tracker_process.py) behind a pipe that is never waited for. Its
code cannot touch the run's random state, signals, threads, stdout or exit; one that fails, hangs, exits or
is killed is told of once, recorded once in events.jsonl, and left behind. Not covered: the processor time
and the memory that a tracker takes from a small machine.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from thinwire.core.errors import UserError

if TYPE_CHECKING:
    from thinwire.train.config import Recipe
    from thinwire.train.rundir import RunDir

START_SECONDS = 120
"""Most seconds to begin; wandb took 100 to find that there is no network."""
LINE_SECONDS = 60
"""Most seconds for one line."""
MAX_WAITING_BYTES = 8 << 20
"""Lines that wait for a slow tracker, about 2000 steps; with more it counts as hung."""
_POLL_SECONDS = 0.02
_REASON_CHARACTERS = 300

Name = Literal["tensorboard", "wandb", "trackio"]


def _split(value: Any) -> Any:
    """`--trackers.names tensorboard,wandb` as the list it means."""
    return [name for part in value.split(",") if (name := part.strip())] if isinstance(value, str) else value


def _refuse_twice(names: tuple[Name, ...]) -> tuple[Name, ...]:
    if len(set(names)) < len(names):
        raise UserError(f"trackers.names = {list(names)} names one twice; each tracker runs once")
    return names


class TrackersConfig(BaseModel):
    """Which trackers get the run's numbers. Nothing here changes a run, so a resume may change it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True
    )

    names: Annotated[tuple[Name, ...], BeforeValidator(_split), AfterValidator(_refuse_twice)] = ()
    """tensorboard, wandb, trackio; each needs the package of its name (the extra thinwire[NAME])."""
    project: str = Field("thinwire", min_length=1)
    """Project in wandb and trackio."""
    group: str = ""
    """Group of the run in wandb and trackio; a comparison puts its directory's name here if it is empty."""
    wandb_mode: Literal["online", "offline"] | None = None
    """online, or offline (kept in RUN/wandb for `wandb sync`); default: as wandb is set (WANDB_MODE)."""
    flush_seconds: float = Field(10.0, ge=0, le=3600)
    """Most seconds that the end of a run waits for all trackers together; what hangs then is killed."""


def refuse_missing(config: TrackersConfig) -> None:
    """UserError for the first tracker whose package is not installed; nothing is imported."""
    for name in config.names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # no origin: just a folder of that name, such as ./wandb
            raise UserError(
                f"trackers.names = {list(config.names)}: {name} is not installed; "
                f"pip install 'thinwire[{name}]', or leave it out"
            )


def failure_note(name: str, reason: str) -> str:
    """One line for a user."""
    return f"tracker {name} failed, the run is unharmed: {reason}"


class Trackers:
    """The trackers of one run. No method raises for what a tracker does, and only `close` waits."""

    def __init__(
        self, recipe: "Recipe", arm: str | None, run: "RunDir", first_step: int, tell: Callable[[str], None]
    ) -> None:
        """Start them; `first_step` is that of the next line of metrics, `tell` takes one line for a user."""
        self._run, self._tell, self._step = run, tell, first_step
        self._flush_seconds = recipe.trackers.flush_seconds
        self._running: list[_Tracker] = []
        for name in recipe.trackers.names:
            try:
                self._running.append(_Tracker(name, _start_line(name, recipe, arm, run, first_step), run))
            except OSError as error:
                self._failed(name, str(error))

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Send the numbers of a line of metrics.jsonl (NaN and inf too); what is no number stays behind."""
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self._step = int(metrics["step"])
        for tracker in self._running:
            tracker.send(numbers)
        self._look()

    def close(self, status: str, *, hurried: bool = False) -> None:
        """End them with the run's status: wait flush_seconds (1 s if hurried, or until Ctrl-C), then kill."""
        for tracker in self._running:
            tracker.send({"finish": status})
        seconds = min(self._flush_seconds, 1.0) if hurried else self._flush_seconds
        deadline = time.monotonic() + seconds
        reason = f"it had not finished {seconds:g} s after the run's end (trackers.flush_seconds)"
        try:
            while self._look() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            reason = "interrupted while it finished"
        for tracker in self._running:
            tracker.kill()
            self._failed(tracker.name, reason)
        self._running = []

    def _look(self) -> bool:
        """Pass on what they said and drop those that ended; whether any is left. Never waits."""
        for tracker in list(self._running):
            place, end = tracker.pump()
            if place:
                self._tell(f"{tracker.name}: {place}")
            if end is not None:
                self._running.remove(tracker)
                tracker.kill()
                if end:
                    self._failed(tracker.name, end)
        return bool(self._running)

    def _failed(self, name: str, reason: str) -> None:
        reason = " ".join(reason.split())[:_REASON_CHARACTERS]
        self._tell(f"{failure_note(name, reason)} (log: {_log(self._run, name)})")
        event = {"step": self._step, "event": "tracker_failed", "tracker": name, "reason": reason}
        with suppress(OSError):  # a full disk is the run's to tell
            self._run.append(self._run.events, event)


class _Tracker:
    """One tracker's process; what it has been sent waits here until its pipe takes it."""

    def __init__(self, name: str, start: Mapping[str, Any], run: "RunDir") -> None:
        self.name = name
        self._waiting, self._said = bytearray(), b""
        self._replies: dict[str, Any] = {}
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        with _log(run, name).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "thinwire.train.tracker_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C in the terminal is the run's alone
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self.send(start)

    def send(self, value: Mapping[str, Any]) -> None:
        """Queue one line."""
        self._waiting += json.dumps(value).encode() + b"\n"

    def pump(self) -> tuple[str, str | None]:
        """Write and read what the pipes take and hold now: (a place to look at, if it has just said one;
        how it ended: None still running, "" well, else why it failed)."""
        code = self._process.poll()  # before the read: all that an ended process said is in the pipe
        with suppress(BlockingIOError, BrokenPipeError):  # a broken pipe: poll tells, now or the next time
            while self._waiting:
                del self._waiting[: os.write(self._stdin.fileno(), self._waiting[: 1 << 16])]
        with suppress(BlockingIOError):
            while block := os.read(self._stdout.fileno(), 1 << 16):
                self._said += block
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError):  # not a reply
                self._replies |= json.loads(line)
        place = self._replies.pop("where", "")
        if code is not None:
            return place, self._how_it_ended(code)
        if len(self._waiting) > MAX_WAITING_BYTES:
            return place, f"it is {len(self._waiting) >> 20} MiB of metrics behind"
        return place, None

    def _how_it_ended(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"hung: a line took it over {LINE_SECONDS} s, or its start over {START_SECONDS} s"
        if code < 0:
            return f"its process was killed by signal {-code} ({signal.strsignal(-code)})"
        if "finished" in self._replies:
            return ""
        return str(self._replies.get("failed", f"its process ended with exit status {code}"))

    def kill(self) -> None:
        """End it and its children at once (those of one that has just ended too), and close the pipes."""
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        for stream in (self._stdin, self._stdout):
            with suppress(OSError):
                stream.close()


def _start_line(name: str, recipe: "Recipe", arm: str | None, run: "RunDir", step: int) -> dict[str, Any]:
    """What the tracker's process is told of the run; OSError where the run's id cannot be kept."""
    config = recipe.model_dump(mode="json", exclude={"arms", "trackers"})
    return {
        "tracker": name,
        "project": recipe.trackers.project,
        "group": recipe.trackers.group,
        "mode": recipe.trackers.wandb_mode,
        "name": f"{arm or recipe.name}-seed-{recipe.seed}",
        "id": _run_id(run),
        "folder": str(run.path.resolve()),
        "first_step": step,
        "config": {"arm": arm, **config},
        "start_seconds": START_SECONDS,
        "line_seconds": LINE_SECONDS,
    }


def _run_id(run: "RunDir") -> str:
    """The run's name to its trackers, kept in its directory: a resumed run goes on with its own series."""
    file = run.path / "trackers" / "id"
    file.parent.mkdir(exist_ok=True)
    known = file.read_text(encoding="utf-8", errors="replace").strip() if file.exists() else ""
    if not known:
        known = secrets.token_hex(4)  # the system's: no random state moves
        file.write_text(f"{known}\n", encoding="utf-8")
    return known


def _log(run: "RunDir", name: str) -> Path:
    return run.path / "trackers" / f"{name}.log"
