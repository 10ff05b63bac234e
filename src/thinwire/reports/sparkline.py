"""Numbers and texts for a terminal cell: sparklines, short numbers, text that cannot act on a terminal."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
"""Stands for readings among which one is NaN or infinite."""


def sparkline(values: Sequence[float] | NDArray[np.float64], width: int) -> str:
    """At most `width` characters, oldest first: means of equal runs of readings, drawn from least to most.

    A level series is drawn at half height. Readings are spaced evenly, whatever their steps.
    """
    readings = np.asarray(values, np.float64)
    if width < 1 or len(readings) == 0:
        return ""
    parts = np.array_split(readings, min(width, len(readings)))
    means = [float(part.mean()) if np.isfinite(part).all() else math.nan for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _block(mean: float, low: float, high: float) -> str:
    if not math.isfinite(mean):
        return NOT_FINITE
    span = high - low  # infinite for readings at both ends of the range of a float
    share = (mean - low) / span if 0 < span < math.inf else 0.5
    return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]


def number(value: float | None, signed: bool = False) -> str:
    """At most 9 characters: 0.5413, 12.34, 1.20e-05, nan; a dash for no reading."""
    if value is None:
        return "-"
    sign = "+" if signed else ""
    if not math.isfinite(value):
        return f"{value:{sign}}"
    size = abs(value)
    if size >= 99999.5 or 0 < size < 1e-4:
        text = f"{value:{sign}.2e}"
        return text if len(text) <= 9 else f"{value:{sign}.1e}"
    digits = 4 if size < 1 else 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{value:{sign}.{digits}f}"


def byte_count(num_bytes: float) -> str:
    """Bytes in units of 1000: 812 B, 5.2 MB."""
    size, unit = num_bytes, "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.5 else f"{size:.1f} {unit}"


def span(seconds: float) -> str:
    """Seconds as 42s, 3m 05s, 2h 07m or 3d 4h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def plain(text: object, longest: int = 2000) -> str:
    """`text` on one line with nothing a terminal would obey: controls, bidirectional marks, half characters.

    What is not printable becomes a space. Rich markup is left as typed: callers print it as rich Text, which
    reads none.
    """
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)[:longest]).split())
