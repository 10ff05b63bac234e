"""One frame of the live view: lines of text for a terminal of a given size, from values alone.

A frame never has more lines than the terminal, nor a line more cells: what does not fit is left out from the
least telling on. All text goes through `plain` and into rich Text, which reads no markup.
"""

import textwrap
from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from thinwire.reports.live import (
    SHOWN,
    Reading,
    RunView,
    event_text,
    is_finished,
    progress_text,
    wire_text,
)
from thinwire.reports.sparkline import number, plain, span, sparkline

STYLES = {"running": "cyan", "done": "green", "failed": "red", "interrupted": "yellow", "unknown": "magenta"}
_LABEL_CELLS = max(len(label) for label, _, _ in SHOWN)
_NUMBER_CELLS = 9
_ROOMY_WIDTH = 60
"""Terminals at least this wide have the column of changes."""
_SILENT_SECONDS = 60.0


def frame(title: str, views: Sequence[RunView], width: int, height: int, footer: str = "") -> list[Text]:
    """The view of one run in full, or one row a run."""
    lines = run_lines(views[0], width, height, footer) if len(views) == 1 else []
    if len(views) != 1:
        lines = table_lines(title, views, width, height, footer)
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height)]


def run_lines(view: RunView, width: int, height: int, footer: str) -> list[Text]:
    """Title, progress, series, wire, verdict, then as many events as there is room for, and a sample."""
    head = [_title(view), _progress(view, width)]
    tail = [_pair("wire", wire_text(view.wire))] if height > 6 else []
    tail += _verdict_lines(view, width, 3 if height >= 20 else 1)
    ending = [Text(plain(footer), style="dim")] if footer and height >= 10 else []
    room = height - len(head) - len(tail) - len(ending)
    num_series = sum(1 for reading in view.readings if len(reading.series))
    kept_for_events = min(len(view.events), 3) if room > 10 else 0
    series = _series_lines(view, width, max(1, min(room - kept_for_events, num_series)))
    body = head + series + tail
    rest = [_pair("note", note) for note in view.run.notes] if is_finished(view) or not num_series else []
    rest = _event_lines([("", view)], height - len(body) - len(ending) - len(rest)) + rest
    if view.sample is not None:
        rest.append(_pair("sample", _sample(view.sample)))
    return (body + rest)[: height - len(ending)] + ending


def table_lines(title: str, views: Sequence[RunView], width: int, height: int, footer: str) -> list[Text]:
    """A head, one row a run, and the newest events of all runs below."""
    counts = Counter(view.status for view in views)
    said = ", ".join(f"{num} {status}" for status, num in counts.items()) or "no run has begun yet"
    head = [Text.assemble((plain(title), "bold"), f"  {said}")]
    ending = [Text(plain(footer), style="dim")] if footer and height >= 10 else []
    if not views:
        return head + ending
    names = [_name(view) for view in views]
    name_cells = min(max(map(len, names)), max(12, width // 4))
    room = height - len(head) - len(ending) - (1 if height > 4 else 0)
    hidden = len(views) - room if len(views) > room else 0
    shown = list(zip(names, views, strict=True))[: room - 1 if hidden else room]
    if height > 4:
        head.append(_table_head(name_cells, width))
    rows = [_row(name, view, name_cells, width) for name, view in shown]
    if hidden:
        rows.append(Text(f"{len(views) - len(shown)} more: a taller terminal shows them", style="dim"))
    left = height - len(head) - len(rows) - len(ending)
    return head + rows + _event_lines(list(zip(names, views, strict=True)), left) + ending


def _name(view: RunView) -> str:
    return f"{plain(view.run.arm)} {view.run.seed}"


def _title(view: RunView) -> Text:
    recipe = plain(view.run.config.get("name", ""))
    text = Text.assemble((plain(view.run.label), "bold"), "  ", _state(view))
    return text.append(f"  {recipe}", style="dim") if recipe else text


def _state(view: RunView) -> tuple[str, str]:
    """The status in words: "finished" where nothing more is to come."""
    silent = view.seconds_silent
    if view.status == "unknown":
        ago = f", last line {span(silent)} ago" if silent is not None else ""
        return f"no summary and no process here{ago}", STYLES["unknown"]
    if is_finished(view):
        return ("finished" if view.status == "done" else f"finished: {view.status}"), STYLES[view.status]
    pause = max(_SILENT_SECONDS, 3 * (view.seconds_per_step or 0))
    quiet = f", silent for {span(silent)}" if silent is not None and silent > pause else ""
    return f"running{quiet}", STYLES["running"]


def _progress(view: RunView, width: int) -> Text:
    text = progress_text(view)
    cells = min(40, width - len(text) - 4)
    if cells < 5 or not view.num_steps:
        return Text(text)
    done = round(cells * min(1.0, max(0.0, view.step / view.num_steps)))
    return Text.assemble(("━" * done, STYLES[view.status]), ("─" * (cells - done), "dim"), f"  {text}")


def _pair(label: str, text: str) -> Text:
    return Text.assemble((f"{label}  ", "dim"), plain(text))


def _series_lines(view: RunView, width: int, num_rows: int) -> list[Text]:
    """The series that were measured, in their order; where rows are few, those of the lowest ranks."""
    ranks = {label: rank for label, _, rank in SHOWN}
    measured = [reading for reading in view.readings if len(reading.series)]
    kept = sorted(measured, key=lambda reading: ranks[reading.label])[:num_rows]
    return [_series_line(reading, width) for reading in measured if reading in kept]


def _series_line(reading: Reading, width: int) -> Text:
    line = Text(f"{reading.label:<{_LABEL_CELLS}} {number(reading.last):>{_NUMBER_CELLS}} ")
    if width >= _ROOMY_WIDTH:
        line.append(f"{number(reading.change, signed=True):>{_NUMBER_CELLS + 1}}  ", style="dim")
    cells = min(80, width - len(line.plain))
    return line.append(sparkline(reading.series.values, cells), style="cyan")


def _verdict_lines(view: RunView, width: int, num_lines: int) -> list[Text]:
    verdict = plain(view.verdict)
    if not verdict:
        return []
    first, *more = textwrap.wrap(f"verdict  {verdict}", max(10, width), max_lines=num_lines, placeholder=" …")
    line = Text(first)
    line.stylize("dim", 0, len("verdict"))
    return [line, *(Text(rest) for rest in more)]


def _event_lines(views: Sequence[tuple[str, RunView]], num_rows: int) -> list[Text]:
    """The newest events, the latest step last; those of one step in the order they were written."""
    events = [(event, name) for name, view in views for event in view.events]
    events.sort(key=lambda pair: step if isinstance(step := pair[0].get("step"), int) else 0)
    newest = events[-num_rows:] if num_rows > 0 else []
    return [_pair(name, event_text(event)) if name else Text(event_text(event)) for event, name in newest]


def _sample(sample: dict[str, object]) -> str:
    response = plain(sample.get("response", ""), 200)
    return f"step {sample.get('step')}, score {sample.get('score')}: {response}"


_COLUMNS = (("score", "score"), ("gap", "gap"), ("valid", "validation"), ("norm", "grad norm"))
"""Head and label of the readings a row shows, the more telling first."""
_COLUMN_CELLS = 9


def _columns(name_cells: int, width: int) -> tuple[tuple[str, str], ...]:
    """As many as leave 8 cells for the gap's sparkline."""
    room = (width - name_cells - 10 - 8) // _COLUMN_CELLS
    return _COLUMNS[: max(1, room)]


def _table_head(name_cells: int, width: int) -> Text:
    columns = _columns(name_cells, width)
    cells = "".join(f"{head:>{_COLUMN_CELLS}}" for head, _ in columns)
    wide = "   gap over steps" + (f"{'wire':>8}{'left':>8}  verdict" if width >= 90 else "")
    return Text(f"{'run':<{name_cells}}{'step':>10}{cells}{wide}", style="dim")


def _row(name: str, view: RunView, name_cells: int, width: int) -> Text:
    line = Text(f"{name[:name_cells]:<{name_cells}}")
    step = f"{view.step}/{view.num_steps}" if view.num_steps else str(view.step)
    line.append(f"{step:>10}", style=STYLES[view.status])
    for _, label in _columns(name_cells, width):
        line.append(f"{_narrow(view.reading(label).last):>{_COLUMN_CELLS}}")
    gap = view.reading("gap").series.values
    if width < 90:
        return line.append("  ").append(sparkline(gap, width - len(line.plain)), style="cyan")
    line.append("   ").append(f"{sparkline(gap, 14):<14}", style="cyan")
    share = view.wire.share_of_dense(view.wire.sent_bytes) if view.wire else None
    line.append(f"{'-' if share is None else f'{share:.2%}':>8}")
    left = view.status if view.seconds_left is None else span(view.seconds_left)
    return line.append(f"{left:>8}  ", style=STYLES[view.status]).append(
        plain(view.verdict).partition(":")[0]
    )


def _narrow(value: float | None) -> str:
    """Three digits, for a column."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1e4 else f"{value:.1e}"
