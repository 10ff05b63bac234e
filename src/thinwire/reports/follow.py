"""Run directories that still grow: each look reads again what has changed since the last one.

Nothing here writes, locks or waits: a run cannot tell that it is watched.
"""

import os
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from thinwire.core.errors import UserError
from thinwire.reports.load import METRICS_FILE, Run, arm_rank, load_run, run_folders
from thinwire.reports.readings import Notes, json_lines, json_object

MAX_EVENTS = 200
"""Events kept of a run, the newest."""
_WATCHED = (METRICS_FILE, "events.jsonl", "config.toml", "summary.json", "environment.json", "rollouts.jsonl")
_LAST_BYTES = 1 << 16

Status = Literal["running", "done", "failed", "interrupted", "unknown"]


@dataclass(frozen=True)
class Look:
    """One run as it stands at one look."""

    run: Run
    status: Status
    events: tuple[dict[str, Any], ...] = ()
    sample: dict[str, Any] | None = None
    """The newest line of rollouts.jsonl: a model's text, which may hold anything."""


class Followed:
    """A run directory, or a comparison's, whose runs may appear while it is watched."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[Path, tuple[object, Look]] = {}
        if not root.is_dir():
            raise UserError(f"watch DIR must be an existing directory, got {str(root)!r}; give a run's --out")
        if not run_folders(root) and not (root / "recipe.toml").is_file():
            raise UserError(
                f"watch DIR must hold a run or a comparison (<arm>/seed-<n>), found neither in "
                f"{str(root)!r}; give the --out of train, compare or demo"
            )

    def look(self) -> list[Look]:
        """Every run there is by now, the dense control first; none before a comparison's first run began."""
        looks = [self._look_at(folder) for folder in run_folders(self.root)]
        return sorted(looks, key=lambda look: (arm_rank(look.run.arm), look.run.seed))

    def _look_at(self, folder: Path) -> Look:
        signature = [_signature(folder / name) for name in _WATCHED]
        known = self._known.get(folder)
        if known is None or known[0] != signature:
            known = (signature, _read(folder, known[1].run if known else None))
            self._known[folder] = known
        return replace(known[1], status=status(known[1].run))


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written, replaced or cut."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(folder: Path, before: Run | None) -> Look:
    """The run now; where a file is damaged or half-written, the last whole run and a note."""
    try:
        run = load_run(folder)
    except (UserError, OSError) as error:
        run = before or Run(folder, folder.name, 0)
        run = replace(run, notes=(str(error),))
    events = deque((event for _, event in json_lines(folder / "events.jsonl", Notes())), maxlen=MAX_EVENTS)
    return Look(run, "unknown", tuple(events), last_object(folder / "rollouts.jsonl"))


def status(run: Run) -> Status:
    """As summary.json says, unless a process holds the directory: a run that goes on still has the old one.

    "unknown" is a run without a summary that no process of this machine holds: it was killed, or it runs
    elsewhere. The lock is not tried, only its file read: trying it would be in the run's way.
    """
    holder = _holder(run.path / ".lock")
    if holder is not None and _lives(holder):
        return "running"
    said = (run.summary or {}).get("status", "done" if run.summary else None)
    known: dict[Any, Status] = {"done": "done", "failed": "failed", "interrupted": "interrupted"}
    return known.get(said, "unknown") if isinstance(said, str) else "unknown"


def _holder(lock: Path) -> int | None:
    try:
        return int(lock.read_text(encoding="ascii", errors="replace")[:20])
    except (OSError, ValueError):
        return None


def _lives(process: int) -> bool:
    """Whether this machine has a process of this id (signal 0 is sent to none)."""
    if process <= 0:
        return False
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def last_object(path: Path) -> dict[str, Any] | None:
    """The last whole object of a JSONL file, looked for in its last 64 KiB."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _LAST_BYTES))
            lines = stream.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = (record for line in reversed(lines) if (record := json_object(line)) is not None)
    return next(found, None)
