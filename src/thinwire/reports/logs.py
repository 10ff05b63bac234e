"""Logs of any trainer as runs with our names: a file's format is told from its content, not its name."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.core.errors import UserError
from thinwire.reports.events import event_folders, read_events
from thinwire.reports.formats import Log, array_rows, console, rows, table
from thinwire.reports.load import METRICS_FILE, Run, load_runs
from thinwire.reports.names import STEP_KEYS, rename

HEAD_BYTES = 1 << 16
TRAINER_STATE = "trainer_state.json"
LOOKED_FOR = (
    "a run directory, verl console lines (step:1 - key:value - ...), a CSV with a step column, JSON lines "
    "with a step, a trainer_state.json with log_history, TensorBoard event files"
)


def read_logs(path: Path | str) -> list[Run]:
    """Every run that a file or folder holds; where there is none a UserError says what was looked for."""
    place = Path(path)
    if not place.exists():
        raise UserError(f"{place} does not exist; give a log file or a run directory")
    if place.is_dir():
        return _read_folder(place)
    if not place.is_file():
        raise UserError(f"{place} is no regular file; give a log file or a run directory")
    logs = _read_file(place)
    runs = [_as_run(place, log) for log in logs if len(log.readings)]
    if not runs:
        raise UserError(f"{place} holds no readings; looked for {LOOKED_FOR}")
    return runs


def _read_folder(folder: Path) -> list[Run]:
    is_run = any((folder / name).is_file() for name in (METRICS_FILE, "config.toml"))
    if is_run or any(folder.glob(f"*/seed-*/{METRICS_FILE}")):
        return [_renamed(run) for run in load_runs(folder)]
    seeds = sorted(file.parent for file in folder.glob(f"seed-*/{METRICS_FILE}"))
    if seeds:  # one arm of a comparison
        return [_renamed(run) for seed in seeds for run in load_runs(seed)]
    state = _trainer_state(folder)
    if state is not None:
        return read_logs(state)
    logs = [(place, read_events(place)) for place in event_folders(folder)]
    runs = [_as_run(place, log) for place, log in logs if len(log.readings)]
    if not runs:
        raise UserError(f"{folder} holds no log; looked for {LOOKED_FOR}, and in folders for {TRAINER_STATE}")
    return runs


def _trainer_state(folder: Path) -> Path | None:
    """TRL's: in the folder itself, or in its last checkpoint."""
    found = [folder / TRAINER_STATE, *folder.glob(f"checkpoint-*/{TRAINER_STATE}")]

    def last(path: Path) -> tuple[bool, int]:
        number = path.parent.name.rpartition("-")[2]
        return path.parent == folder, int(number) if number.isdigit() else 0

    return max((path for path in found if path.is_file()), key=last, default=None)


def _read_file(path: Path) -> Sequence[Log]:
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if not head.strip():
        raise UserError(f"{path} is empty; looked for {LOOKED_FOR}")
    if "tfevents" in path.name:
        return [read_events(path.parent)]
    if b"\0" in head:
        raise UserError(f"{path} is binary; looked for {LOOKED_FOR}")
    text = head.decode("utf-8-sig", "replace").lstrip()
    first = text.splitlines()[0]
    if text.startswith("["):
        return [array_rows(path, None)]
    if text.startswith("{"):
        try:
            record = json.loads(first)
        except (ValueError, RecursionError):
            record = None
        one_line = len(text) == len(first) or len(head) == HEAD_BYTES
        if (record is None and not _second_line_is_json(text)) or (one_line and "log_history" in first):
            return [array_rows(path, "log_history")]
        return [rows(path)]
    for delimiter in (",", ";", "\t"):
        cells = {cell.strip() for cell in next(csv.reader([first], delimiter=delimiter), [])}
        if len(cells) > 1 and cells & set(STEP_KEYS):
            return table(path, delimiter)
    return [console(path)]


def _second_line_is_json(text: str) -> bool:
    """Whether a file whose first line is damaged is JSONL after all."""
    for line in text.splitlines()[1:3]:
        try:
            return isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            continue
    return False


def _as_run(path: Path, log: Log) -> Run:
    notes = log.notes.lines()
    out_of_order = log.readings.num_out_of_order()
    if out_of_order:
        notes.append(f"{out_of_order} steps repeat or fall back: the last reading of each step counts")
    return _renamed(Run(path=path, arm=log.name, seed=0, series=log.readings.series(), notes=tuple(notes)))


def _renamed(run: Run) -> Run:
    series, notes = rename(run.series)
    return replace(run, series=series, notes=(*run.notes, *notes))
