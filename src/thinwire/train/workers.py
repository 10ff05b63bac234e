"""The runs of a comparison as processes of their own.

Each run is a `python -m thinwire train`: a crash or a kill of one (memory, a broken reward function) cannot
take another with it, nothing is pickled, and any run can be repeated by hand. The parent polls each run's
metrics.jsonl instead of listening to a pipe that could block.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from thinwire.train.checkpoint import list_steps
from thinwire.train.config import Recipe
from thinwire.train.places import read_object, read_status
from thinwire.train.progress import Display, Observer
from thinwire.train.signals import PARENT, counted_signals
from thinwire.train.summary import run_summary
from thinwire.train.trackers import failure_note

_POLL_SECONDS = 0.3


@dataclass(frozen=True)
class PlannedRun:
    """One arm with one seed, resolved, and the directory it runs in."""

    arm: str
    seed: int
    recipe: Recipe
    out: Path

    @property
    def label(self) -> str:
        return f"{self.arm} seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """A comparison ready to start: the recipe's own bytes, the overrides for every arm, the runs."""

    name: str
    recipe_bytes: bytes
    overrides: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    out: Path


def run_all(waiting: list[PlannedRun], plan: Plan, jobs: int, display: Display) -> dict[str, str]:
    """Run all of them, `jobs` at a time; the last words of those that failed, by label.

    The first SIGINT, SIGTERM or SIGHUP asks every run to stop at its step boundary; a second one kills them.
    No run outlives this call; one whose parent is killed stops at its step boundary too.
    """
    running: list[_Worker] = []
    errors: dict[str, str] = {}
    passed_on = 0
    with counted_signals() as received:
        try:
            while running or (waiting and not received):
                while waiting and not received and len(running) < jobs:
                    running.append(_Worker(waiting.pop(0), plan, display.observer()))
                time.sleep(_POLL_SECONDS)
                if len(received) > passed_on:
                    for worker in running:
                        worker.stop(signal.SIGKILL if passed_on else signal.SIGTERM)
                    passed_on = len(received)
                for worker in [worker for worker in running if worker.is_over()]:
                    running.remove(worker)
                    errors |= worker.close()
        finally:
            for worker in running:
                worker.stop(signal.SIGKILL)
    return errors


class _Worker:
    """One run's process, its log beside the run directory, and what it has written so far."""

    def __init__(self, run: PlannedRun, plan: Plan, observer: Observer) -> None:
        self.run, self._observer = run, observer
        self._metrics = Tail(run.out / "metrics.jsonl", skip_existing=True)
        self._events = Tail(run.out / "events.jsonl", skip_existing=True)
        steps = list_steps(run.out / "checkpoints")
        self._first_step = (steps[-1] if steps else 0) + 1
        observer.start(run.label, self._first_step, run.recipe.steps)
        self._log_path = run.out.with_suffix(".log")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._stopped_by: list[int] = []
        self._log: IO[bytes] = self._log_path.open("wb")
        self._process = subprocess.Popen(
            worker_command(run, plan, resume=bool(steps)),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1", PARENT: str(os.getpid())},
            process_group=0,  # Ctrl-C reaches the parent only, which passes it on once
        )

    def is_over(self) -> bool:
        """Pass on the steps taken since the last call; whether the process has ended."""
        over = self._process.poll() is not None
        for row in self._metrics.new_rows():
            if row["step"] >= self._first_step:
                self._observer.step(row["step"], row)
        for event in self._events.new_rows():
            if event["event"] == "tracker_failed" and event["step"] >= self._first_step - 1:
                self._observer.message(failure_note(event["tracker"], event["reason"]))
        return over

    def stop(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._stopped_by.append(number)
            self._process.send_signal(number)

    def close(self) -> dict[str, str]:
        """The run's label and last line of stderr if it failed."""
        self._log.close()
        code = self._process.returncode
        stopped = code == 130 or -code in self._stopped_by  # the latter before its first step, or at once
        if stopped or (code == 0 and read_status(self.run.out) == "done"):
            self._observer.finish(summary_of(self.run, None))
            return {}
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if code == 0:  # os._exit in a reward, for one
            ended = "the process ended before its run did (exit status 0)"
        error = lines[-1] if lines and code > 0 else ended
        self._observer.message(f"failed: {error} (log: {self._log_path})")
        self._observer.finish(summary_of(self.run, error))
        return {self.run.label: error}


def worker_command(run: PlannedRun, plan: Plan, *, resume: bool) -> list[str]:
    """The command line that takes one run, or takes it up again."""
    start = [sys.executable, "-m", "thinwire", "train"]
    if resume:
        return [*start, *_tracker_settings(run.recipe), "--resume", str(run.out)]
    recipe = [str(plan.out / "recipe.toml"), "--arm", run.arm, "--out", str(run.out)]
    return [*start, *recipe, *plan.overrides, f"--seed={run.seed}"]


def _tracker_settings(recipe: Recipe) -> list[str]:
    """[trackers] as it is now: the one part of a recipe that may differ from what the run began with."""
    table = recipe.trackers.model_dump(mode="json", exclude_none=True)
    return [f"--trackers.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]


class Tail:
    """The whole lines added to a metrics file since the last look; a file cut by a resume starts over."""

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if skip_existing and path.exists() else 0

    def new_rows(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < self._offset:
                    self._offset = 0
                stream.seek(self._offset)
                block = stream.read()
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


def summary_of(run: PlannedRun, error: str | None, at_steps: Sequence[int] = ()) -> dict[str, Any]:
    """The run's own summary if it ended well, else one out of what its metrics hold.

    With `at_steps` its readings are taken at those steps instead of the quarter marks.
    """
    status = read_status(run.out)
    if error is None and status == "done":
        own = read_object(run.out / "summary.json")
        if not at_steps:
            return own
        rows = Tail(run.out / "metrics.jsonl").new_rows()
        return run_summary(rows, own["name"], own["arm"], own["seed"], "done", own["seconds"], at_steps)
    rows = Tail(run.out / "metrics.jsonl").new_rows()
    seconds = sum(row.get("timing_s/step", 0.0) + row.get("timing_s/validation", 0.0) for row in rows)
    status = "failed" if error is not None else "interrupted"
    summary = run_summary(rows, run.recipe.name, run.arm, run.seed, status, seconds, at_steps or None)
    return summary | ({"error": error} if error is not None else {})
