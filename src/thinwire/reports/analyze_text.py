"""The analysis as text for a terminal."""

import textwrap
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

MIN_WIDTH = 100
MAX_BLOCKS = 12
MAX_NOTES = 6
MAX_RUNS = 3
"""Of more runs than these only the verdicts are printed, the tables of each are in --json."""


def describe(analysis: Mapping[str, Any], width: int) -> str:
    """Tables and verdict of every run, then comparison and pooled slopes, then the rules."""
    width = max(MIN_WIDTH, width)
    short = len(analysis["runs"]) > MAX_RUNS
    parts = [_verdict(run, width) if short else _run(run, analysis, width) for run in analysis["runs"]]
    if analysis["comparison"]:
        parts.append(_comparison(analysis["comparison"], analysis["confidence"], width))
    parts += [_pooled(arm, analysis["pooled_confidence"], width) for arm in analysis["pooled"]]
    rules = [analysis["rule"], analysis["change_rule"]] + (
        [analysis["pool_rule"]] if analysis["pooled"] else []
    )
    parts.append("\n".join(textwrap.fill(f"Rule. {text}", width) for text in rules))
    return "\n\n".join(parts)


def _run(run: Mapping[str, Any], analysis: Mapping[str, Any], width: int) -> str:
    lines, notes = [], run["notes"]
    lines += [f"  note: {note}" for note in notes[:MAX_NOTES]]
    lines += [f"  and {len(notes) - MAX_NOTES} more notes (--json)"] if len(notes) > MAX_NOTES else []
    lines += [f"  missing: {key}" for key in run["missing"]]
    lines += [f"  the log has: {', '.join(run['available'][:20])}"] if not run["series"] else []
    if run["series"]:
        lines += [_statistics(run["series"], analysis["confidence"], width), _blocks(run["series"], width)]
        lines += [line for key, found in run["series"].items() for line in _more(key, found)]
    return "\n".join([_title(run), *(line for line in lines if line), _verdict(run, width, title=False)])


def _title(run: Mapping[str, Any]) -> str:
    return f"{run['path']} ({run['arm']}, seed {run['seed']})"


def _verdict(run: Mapping[str, Any], width: int, title: bool = True) -> str:
    lines = [f"{_title(run)}: {run['verdict']['word']}" if title else f"VERDICT: {run['verdict']['word']}"]
    for reason in run["verdict"]["reasons"]:
        lines.append(textwrap.fill(reason, width, initial_indent="  - ", subsequent_indent="    "))
    if run["verdict"]["steps_needed"]:
        lines.append(f"  about {run['verdict']['steps_needed']} more steps are needed")
    return "\n".join(lines)


def _statistics(series: Mapping[str, Any], confidence: float, width: int) -> str:
    """Level and slope with the interval that verdicts use; below it the other estimates, for comparison."""
    table = _table("steps", "n", "start", "end", "ratio", "OLS slope", f"{confidence:.0%} interval")
    others = _table("NW error", "Theil-Sen", "M-K tau", "M-K p", "autocorrelation")
    for key, found in series.items():
        sen, kendall = found["theil_sen"] or {}, found["mann_kendall"] or {}
        levels = (found[name] for name in ("start_level", "end_level", "drift_ratio"))
        table.add_row(
            _name(key, found),
            f"{found['first']}-{found['last']}",
            str(found["readings"]),
            *(number(level) for level in levels),
            number(found["ols_slope"], "+"),
            _interval(found["slope"]),
        )
        others.add_row(
            _name(key, found),
            number(found["newey_west_error"]),
            number(sen.get("slope"), "+"),
            number(kendall.get("tau"), "+"),
            number(kendall.get("p_if_independent")),
            number(found["autocorrelation"]),
        )
    footnote = (
        "Slopes are per step. lens: read through the codec, no verdict uses it. The interval holds under "
        "autocorrelation. NW error: Newey-West's, too small where that is strong. M-K p: Mann-Kendall's, for "
        "independent readings."
    )
    return "\n".join([_rendered(table, width), _rendered(others, width), textwrap.fill(footnote, width)])


def _blocks(series: Mapping[str, Any], width: int) -> str:
    """Medians and maxima of 50 steps; of many blocks evenly spread ones."""
    table = _table("median / max of 50-step blocks")
    for key, found in series.items():
        blocks = found["blocks"]
        if len(blocks) > MAX_BLOCKS:
            picked = [round(i * (len(blocks) - 1) / (MAX_BLOCKS - 1)) for i in range(MAX_BLOCKS)]
            blocks = [blocks[i] for i in picked]
        table.add_row(
            _name(key, found),
            "  ".join(f"{b['first']}: {number(b['median'])}/{number(b['max'])}" for b in blocks),
        )
    return _rendered(table, width)


def _more(key: str, found: Mapping[str, Any]) -> list[str]:
    """Change points, and for a projected series its curvature and where it crosses the bound."""
    lines = []
    if found["change_points"]:
        lines.append(f"{key}: level shifts at steps {', '.join(map(str, found['change_points'][:12]))}")
    projected = found["projection"]
    if projected:
        curve = "parabola" if projected["degree"] == 2 else "line"
        at = f"step {projected['crossing']:.0f}" if projected["crossing"] is not None else "no step"
        early, late = (
            f"{projected[side]:.0f}" if projected[side] is not None else f"beyond {projected['horizon']}"
            for side in ("earliest", "latest")
        )
        lines.append(f"{key}: the {curve} reaches {projected['bound']:g} at {at} (from {early} to {late})")
    if found["acceleration"] and key.startswith(("rollout_corr/kl", "sampling/")):
        lines.append(f"{key}: acceleration a step squared {_with_interval(found['acceleration'])}")
    return lines


def _comparison(found: Mapping[str, Any], confidence: float, width: int) -> str:
    title = " minus ".join(
        f"{found[side]['arm']}, seed {found[side]['seed']}" for side in ("second", "first")
    )
    columns = (
        "common steps",
        f"mean difference, {confidence:.0%} interval",
        "its slope a step",
        "inverts at",
    )
    table = _table(*columns)
    for key, row in found["series"].items():
        mean = _with_interval(row["mean_estimate"]) if row["mean_estimate"] else number(row["mean"])
        steps = f"{row['steps']} ({row['first']}-{row['last']})"
        table.add_row(_name(key, row), steps, mean, _with_interval(row["slope"]), str(row["crossing"] or "-"))
    body = _rendered(table, width) if found["series"] else "no series in common"
    return f"MATCHED STEPS: {title}\n{body}"


def _pooled(arm: Mapping[str, Any], confidence: float, width: int) -> str:
    table = _table("runs", f"pooled slope a step, {confidence:.0%} interval", "between seeds")
    for key, row in arm["slopes"].items():
        table.add_row(
            _name(key, row), str(row["runs"]), _with_interval(row), number(row["between_deviation"])
        )
    seeds = ", ".join(f"{seed}: {word}" for seed, word in zip(arm["seeds"], arm["words"], strict=True))
    body = _rendered(table, width) if arm["slopes"] else "too few readings to pool"
    return f"POOLED: {arm['arm']}, {len(arm['seeds'])} runs, worst verdict {arm['word']} ({seeds})\n{body}"


def _table(*columns: str) -> Table:
    """A table whose first column, the series, is never cut."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("series", no_wrap=True)
    for column in columns:
        table.add_column(column, no_wrap="blocks" not in column)
    return table


def _name(key: str, found: Mapping[str, Any]) -> str:
    return f"{key} (lens)" if found["lens"] else key


def _with_interval(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    return f"{number(estimate['value'], '+')} {_interval(estimate)}"


def _interval(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    low, high = estimate["interval"]
    return f"[{number(low, '+')}, {number(high, '+')}]"


def number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3g}"


def _rendered(table: Table, width: int) -> str:
    buffer = StringIO()
    Console(file=buffer, width=width, no_color=True).print(table)
    return _trimmed(buffer.getvalue().splitlines())


def _trimmed(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines if line.strip())
