"""Series, gathered reading by reading from files of any size; half-written lines are normal."""

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_INTEGER = 2**53
"""Larger integers are no step and no reading: a float does not hold them exactly."""
MAX_NOTES = 20


@dataclass(frozen=True)
class Series:
    """Readings of one key: `steps` strictly increasing, `values` of the same length (NaN, inf kept)."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: int) -> float | None:
        """The reading of exactly this step, None where it was not measured."""
        index = int(np.searchsorted(self.steps, step))
        found = index < len(self.steps) and int(self.steps[index]) == step
        return float(self.values[index]) if found else None

    def between(self, first: int, last: int) -> "Series":
        """The readings of steps first..last, both included."""
        inside = (self.steps >= first) & (self.steps <= last)
        return Series(self.steps[inside], self.values[inside])

    def finite(self) -> "Series":
        """The readings that are finite numbers."""
        known = np.isfinite(self.values)
        return Series(self.steps[known], self.values[known])


EMPTY_SERIES = Series(np.zeros(0, np.int64), np.zeros(0, np.float64))


class Notes:
    """What was left out while reading: the first 20 kinds with their counts, of the rest their number."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._more = 0

    def add(self, line: str) -> None:
        if line in self._counts or len(self._counts) < MAX_NOTES:
            self._counts[line] = self._counts.get(line, 0) + 1
        else:
            self._more += 1

    def lines(self) -> list[str]:
        counted = [line if num == 1 else f"{line} ({num} times)" for line, num in self._counts.items()]
        return [*counted, *([f"and {self._more} more like these"] if self._more else [])]


class Readings:
    """Steps and values by key, 16 bytes a reading, in the order they come."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def __len__(self) -> int:
        return sum(len(steps) > 0 for steps, _ in self._columns.values())

    def add(self, step: int, key: str, value: float) -> None:
        steps, values = self.column(key)
        steps.append(step)
        values.append(value)

    def column(self, key: str) -> tuple["array[int]", "array[float]"]:
        """The steps and values of a key, to be added to together: the way for millions of readings."""
        column = self._columns.get(key)
        if column is None:
            column = self._columns[key] = (array("q"), array("d"))
        return column

    def add_record(self, step: int, record: Mapping[str, Any], step_key: str) -> None:
        """Every number of a JSON object but the step itself."""
        for key, raw in record.items():
            value = number(raw)
            if value is not None and key != step_key:
                self.add(step, key, value)

    def num_out_of_order(self) -> int:
        """Readings whose step is not above the one before, of the key that has most of them."""
        counts = (
            int((np.diff(np.frombuffer(steps, np.int64)) <= 0).sum()) for steps, _ in self._columns.values()
        )
        return max(counts, default=0)

    def series(self) -> dict[str, Series]:
        """In step order; a repeated step keeps its last reading."""
        found = {}
        for key, column in self._columns.items():
            if not len(column[0]):
                continue
            steps, values = np.frombuffer(column[0], np.int64), np.frombuffer(column[1], np.float64)
            if not (np.diff(steps) > 0).all():
                order = np.argsort(steps, kind="stable")
                steps, values = steps[order], values[order]
                last = np.append(steps[1:] != steps[:-1], True)
                steps, values = steps[last], values[last]
            found[key] = Series(steps, values)
        return found


def json_lines(path: Path, notes: Notes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; any other line is named in `notes`.

    This is the seam for a run in progress and for one resumed after a kill in mid-write.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = json_object(line)
            if record is not None:
                yield line_number, record
            else:
                notes.add(f"{path.name} line {line_number} is not a JSON object and was left out")


def json_object(line: str) -> dict[str, Any] | None:
    """The JSON object a line holds, None where it holds anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or an integer of thousands of digits
        return None
    return record if isinstance(record, dict) else None


def number(raw: Any) -> float | None:
    """JSON numbers, NaN and inf as tokens or strings, as float; None for anything else."""
    if isinstance(raw, float):
        return raw
    if isinstance(raw, bool):
        return None
    if isinstance(raw, int):
        return float(raw) if abs(raw) < MAX_INTEGER else None
    if isinstance(raw, str) and raw.strip().lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(raw)
    return None


def whole_step(raw: Any) -> int | None:
    """A step number; None for what is no finite number or too large to be a step."""
    value = number(raw)
    return int(value) if value is not None and abs(value) < MAX_INTEGER else None
