"""One reader a log format: a file in, named readings out, streamed: memory holds numbers, not text."""

import csv
import json
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from thinwire.reports.names import STEP_KEYS
from thinwire.reports.readings import Notes, Readings, json_lines, whole_step

MAX_LINE_BYTES = 1 << 20
CHUNK_CHARACTERS = 1 << 20
MAX_RECORD_CHARACTERS = 16 << 20
ROWS_TO_FIND_STEPS = 200
STEP_LINE = re.compile(rb"(?<![\w/.:-])step:(-?\d{1,15}) - ")
ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
WRAPPED = re.compile(rb"^np\.\w+\((.*)\)$")


@dataclass
class Log:
    """Readings of one run as a file names them."""

    name: str
    readings: Readings = field(default_factory=Readings)
    notes: Notes = field(default_factory=Notes)


def console(path: Path) -> Log:
    """verl's console lines `step:12 - key:value - ...`, after any prefix, with or without colours.

    Lines over 1 MB are read in pieces; they are no such lines.
    """
    log = Log(path.stem)
    columns: dict[bytes, tuple[array[int], array[float]]] = {}
    with path.open("rb") as stream:
        for line in iter(lambda: stream.readline(MAX_LINE_BYTES), b""):
            if b"step:" not in line:
                continue
            if b"\x1b" in line:
                line = ANSI.sub(b"", line)
            found = STEP_LINE.search(line)
            if found is None:
                continue
            step = int(found[1])
            for item in line[found.end() :].split(b" - "):
                raw_key, _, raw = item.rpartition(b":")
                try:
                    value = float(raw)
                except ValueError:
                    unwrapped = _unwrap(raw)
                    if unwrapped is None:
                        continue
                    value = unwrapped
                column = columns.get(raw_key)
                if column is None:
                    key = raw_key.decode("utf-8", "replace").strip()
                    if not key:
                        continue
                    column = columns[raw_key] = log.readings.column(key)
                column[0].append(step)
                column[1].append(value)
    return log


def _unwrap(raw: bytes) -> float | None:
    """np.float64(0.5), or the last value of a line with something after it."""
    words = raw.split()
    found = WRAPPED.match(words[0]) if words else None
    with suppress(ValueError, IndexError):
        return float(found[1] if found else words[0])
    return None


def rows(path: Path) -> Log:
    """JSONL, one object a row (W&B history, metrics.jsonl); null, text and nested values are skipped."""
    log = Log(path.stem)
    _add_rows(log, (record for _, record in json_lines(path, log.notes)))
    return log


def array_rows(path: Path, member: str | None) -> Log:
    """The objects of a JSON array: of the file's own, or of `member` of its object (TRL's log_history)."""
    log = Log(path.parent.name if member and path.parent.name else path.stem)
    with path.open(encoding="utf-8", errors="replace") as stream:
        _add_rows(log, _array_objects(stream, f'"{member}"' if member else None, log.notes))
    return log


def _add_rows(log: Log, records: Iterator[dict[str, Any]]) -> None:
    """Rows by the best step key that the first 200 of them have; rows without it are counted."""
    head = [record for _, record in zip(range(ROWS_TO_FIND_STEPS), records, strict=False)]
    step_key = next(
        (key for key in STEP_KEYS if any(whole_step(row.get(key)) is not None for row in head)), None
    )
    if step_key is None:
        return
    for part in (head, records):
        for record in part:
            step = whole_step(record.get(step_key))
            if step is None:
                log.notes.add(f"a row without {step_key} was left out")
            else:
                log.readings.add_record(
                    step, {k: v for k, v in record.items() if k not in STEP_KEYS}, step_key
                )


def _array_objects(stream: TextIO, after: str | None, notes: Notes) -> Iterator[dict[str, Any]]:
    """The objects of the first array (behind the text `after`), a megabyte of text at a time."""
    decoder, text = json.JSONDecoder(), ""
    for opening in (after, "["):
        while opening and (at := text.find(opening)) < 0:
            chunk = stream.read(CHUNK_CHARACTERS)
            if not chunk:
                return
            text = text[1 - len(opening) :] + chunk if len(opening) > 1 else chunk
        text = text[at + len(opening) :] if opening else text
    position = 0
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        try:
            if text[position] == "]":
                return
            value, position = decoder.raw_decode(text, position)
        except (ValueError, IndexError, RecursionError):
            chunk = stream.read(CHUNK_CHARACTERS)
            if not chunk or len(text) - position > MAX_RECORD_CHARACTERS:
                notes.add("a record of the file is broken; what follows it was left out")
                return
            text, position = text[position:] + chunk, 0
            continue
        if isinstance(value, dict):
            yield value


def table(path: Path, delimiter: str) -> list[Log]:
    """CSV with a step column: one key a column, or W&B's chart export with columns `RUN - KEY`."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        reader = csv.reader((line.replace("\0", "") for line in stream), delimiter=delimiter)
        header = [cell.strip() for cell in next(reader, [])]
        step_column = header.index(next(key for key in STEP_KEYS if key in header))
        logs: dict[str, Log] = {}
        columns = []
        for index, cell in enumerate(header):
            run, dash, key = cell.rpartition(" - ")
            if index == step_column or cell in STEP_KEYS or not key or key.endswith(("__MIN", "__MAX")):
                continue
            log = logs.setdefault(run, Log(run if dash else path.stem))
            columns.append((index, *log.readings.column(key)))
        for cells in reader:
            step = _whole(cells[step_column]) if len(cells) > step_column else None
            if step is None:
                for log in logs.values():
                    log.notes.add("a line without a step was left out")
                continue
            cells += [""] * (len(header) - len(cells))
            for index, steps, values in columns:
                if cells[index]:
                    try:
                        values.append(float(cells[index]))
                    except ValueError:
                        continue
                    steps.append(step)
    return list(logs.values())


def _whole(raw: str) -> int | None:
    try:
        return whole_step(float(raw))
    except (ValueError, OverflowError):
        return None
