"""The readings as text for a terminal: what the trainer sees, what each boundary loses, what it costs."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 80
LABEL = 22
"""Columns of a codec's name at most: longer ones go on below."""
DIRECTIONS = ("forward", "backward")


def describe(found: Mapping[str, Any]) -> str:
    """Three tables of at most 80 columns, the sweep if there is one, and what the columns mean."""
    rows = found["codecs"]
    parts = [_head(found), _seen(rows), _lost(rows), _cost(rows)]
    if found["sweep"]:
        parts.append(_swept(found["sweep"]))
    parts += [fill(f"not measured: {one['label']}{_at(one)}: {one['reason']}") for one in found["refused"]]
    broken = [row for row in rows if row["gradient"]["not_finite"]]
    parts += [fill(f"{row['label']}: not finite: {row['gradient']['not_finite']}") for row in broken]
    return "\n".join([*parts, fill(_notes(found))])


def _head(found: Mapping[str, Any]) -> str:
    scored, teaching, model = found["scored"], found["statistics"], found["model"]
    return fill(
        f"{model['source']}, width {model['width']}, boundaries after blocks {_list(model['boundaries'])}, "
        f"{model['dtype']}. Scored: {scored['response_tokens']} response tokens of {scored['rollouts']} "
        f"rollouts. Statistics: {teaching['tokens']} tokens of {teaching['rollouts']} others, "
        f"{teaching['fires']} fires."
    )


def _seen(rows: Sequence[Mapping[str, Any]]) -> str:
    table = new_table("codec", "gap, nats", "95% interval", "KL", "entropy", "cosine", "|g|/|g0|")
    for row in rows:
        gap, gradient = row["gap"], row["gradient"]
        table.add_row(
            label(row["label"]),
            number(gap["mean"]),
            f"{number(gap['low'])}..{number(gap['high'])}",
            number(row["kl"]["mean"]),
            number(row["entropy"]["view"]),
            number(gradient["cosine"]),
            number(gradient["norm_ratio"]),
        )
    return rendered(table)


def _lost(rows: Sequence[Mapping[str, Any]]) -> str:
    table = new_table("codec", "error", "bias", "Gaussian", "error back", "bias back", "Gaussian back")
    for row in rows:
        cells = [
            _mean([boundary[direction][key] for boundary in row["boundaries"]])
            for direction in DIRECTIONS
            for key in ("relative_error", "squared_bias", "gaussian_reference")
        ]
        table.add_row(label(row["label"]), *map(number, cells))
    return rendered(table)


def _cost(rows: Sequence[Mapping[str, Any]]) -> str:
    table = new_table(
        "codec", "bits", "bits a value", "side bits", "encode us", "decode us", "draw us", "of a layer"
    )
    for row in rows:
        micro = row["microseconds_per_token"]
        table.add_row(
            label(row["label"]),
            f"{max(row['bits_per_token'].values()):.0f}",
            number(row["bits_per_value"]),
            number(row["side_channel"]["bits_per_token"]),
            *(number(micro[name]) for name in ("encode", "decode", "draw")),
            f"{micro['share_of_layer']:.1%}",
        )
    return rendered(table)


def _swept(points: Sequence[Mapping[str, Any]]) -> str:
    table = new_table("codec, sweep", "bits a value", "gap, nats", "95% interval", "KL", "entropy")
    for point in points:
        gap = point["gap"]
        table.add_row(
            label(point["label"]),
            number(point["bits_per_value"]),
            number(gap["mean"]),
            f"{number(gap['low'])}..{number(gap['high'])}",
            number(point["kl"]["mean"]),
            number(point["entropy"]["view"]),
        )
    return rendered(table)


def _notes(found: Mapping[str, Any]) -> str:
    dense = next((row["entropy"]["dense"] for row in found["codecs"]), math.nan)
    return (
        f"KL: of dense to view, whole vocabulary. Dense entropy {number(dense)}. cosine, |g|/|g0|: one "
        f"draw's parameter gradient to the dense one. error: |x~-x|^2/|x|^2, mean over boundaries; bias: its "
        f"part that no redraw averages away (noise may put it below 0); Gaussian: the rate-distortion limit "
        f"of the covariance at these bits. bits, microseconds: a token a boundary, each way. side bits: the "
        f"learned state over {found['cadence']} steps of {found['tokens_per_step']} tokens. --json has every "
        f"boundary."
    )


def number(value: float | None) -> str:
    """Three digits, plain where that is short, else two."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.1e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.3g}"


def label(name: str) -> str:
    """A codec's name in lines of LABEL columns."""
    return "\n".join(name[start : start + LABEL] for start in range(0, len(name), LABEL))


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present else None


def _at(refused: Mapping[str, Any]) -> str:
    budget = refused["bits_per_value"]
    return "" if budget is None else f" at {budget:g} bits a value"


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def fill(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def new_table(first: str, *headers: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    return table


def rendered(table: Table) -> str:
    buffer = StringIO()
    Console(file=buffer, width=WIDTH, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n")
