"""A chart with two logarithmic axes as inline SVG: lines, intervals, straight references. Loads no torch."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 66, 150, 12, 46
NUM_COLOURS = 9
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True)
class Curve:
    """Points (x, y, low, high) of one line, all above 0; `dashed` is a reference.

    `slot` numbers its colour of the page's palette; beyond NUM_COLOURS they repeat with hollow dots.
    """

    label: str
    points: Sequence[tuple[float, float, float, float]]
    slot: int = 0
    dashed: bool = False


def loglog_svg(curves: Sequence[Curve], x_title: str, y_title: str) -> str:
    """The chart, or "" without a point above 0; colours are those of the page's palette (--arm-N)."""
    kept = [Curve(c.label, _positive(c.points), c.slot, c.dashed) for c in curves]
    kept = [curve for curve in kept if curve.points]
    if not kept:
        return ""
    xs = [x for curve in kept for x, *_ in curve.points]
    ys = [y for curve in kept for _, *values in curve.points for y in values]
    axes = _Axes(*_padded(xs, 0.04), *_padded(ys, 0.06))
    parts = _grid(axes, x_title, y_title)
    for curve in kept:
        parts += _curve(curve, axes)
    parts += _labels(kept, axes)
    label = html.escape(f"{y_title} against {x_title}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


@dataclass(frozen=True)
class _Axes:
    """Maps values to the SVG's units through their logarithms."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (math.log10(value) - self.left) / (self.right - self.left) * _PLOT_WIDTH

    def y(self, value: float) -> float:
        return TOP + (self.high - math.log10(value)) / (self.high - self.low) * _PLOT_HEIGHT


def _curve(curve: Curve, axes: _Axes) -> list[str]:
    points = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y, *_ in curve.points)
    if curve.dashed:
        return [f'<polyline class="mark level" points="{points}"/>']
    colour, turn = curve.slot % NUM_COLOURS, curve.slot // NUM_COLOURS
    dot = f"f{colour}" if turn == 0 else f"hollow s{colour}"
    parts = [f'<polyline class="line s{colour}" points="{points}"/>'] if len(curve.points) > 1 else []
    for x, y, low, high in curve.points:
        title = f"<title>{html.escape(curve.label)}: {x:.4g}, {y:.4g} ({low:.4g} to {high:.4g})</title>"
        at = f"{axes.x(x):.1f}"
        if high > low:
            path = f"M{at} {axes.y(low):.1f}V{axes.y(high):.1f}"
            parts.append(f'<path class="whisker s{colour}" d="{path}"/>')
        parts.append(f'<circle class="{dot}" cx="{at}" cy="{axes.y(y):.1f}" r="4">{title}</circle>')
    return parts


def _labels(curves: Sequence[Curve], axes: _Axes) -> list[str]:
    """Each curve's name right of its last point, kept apart and within the plot."""
    ordered = sorted(curves, key=lambda curve: -curve.points[-1][1])
    places = apart([axes.y(curve.points[-1][1]) for curve in ordered], TOP, TOP + _PLOT_HEIGHT)
    parts = []
    for curve, y in zip(ordered, places, strict=True):
        colour = "tick" if curve.dashed else f"name f{curve.slot % NUM_COLOURS}"
        x, label = axes.x(curve.points[-1][0]) + 9, html.escape(curve.label)
        parts.append(f'<text class="{colour}" x="{x:.1f}" y="{y:.1f}" dy=".35em">{label}</text>')
    return parts


def apart(places: Sequence[float], low: float, high: float, distance: float = 16.0) -> list[float]:
    """Rising places moved as little as one pass down and one pass up need to keep them `distance` apart and,
    while they fit, within low..high."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + distance if moved else low))
    limit = max(high, low + distance * (len(moved) - 1))
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - distance
    return moved


def _grid(axes: _Axes, x_title: str, y_title: str) -> list[str]:
    parts = []
    for tick in log_ticks(axes.low, axes.high):
        y = f"{axes.y(tick):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {y}h{_PLOT_WIDTH}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y}" dy=".35em" text-anchor="end">{tick:g}</text>'
        )
    middle = 'text-anchor="middle"'
    for tick in log_ticks(axes.left, axes.right):
        x, foot = f"{axes.x(tick):.1f}", HEIGHT - BOTTOM + 18
        parts.append(f'<path class="grid" d="M{x} {TOP}v{_PLOT_HEIGHT}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{foot}" {middle}>{tick:g}</text>')
    centre = LEFT + _PLOT_WIDTH // 2
    parts.append(f'<text class="tick" x="{centre}" y="{HEIGHT - 8}" {middle}>{html.escape(x_title)}</text>')
    turned = f'transform="translate(14 {TOP + _PLOT_HEIGHT // 2}) rotate(-90)" {middle}'
    parts.append(f'<text class="tick" {turned}>{html.escape(y_title)}</text>')
    return parts


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within [10^low, 10^high]; powers alone, and fewer, over many decades."""
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    stride = max(1, math.ceil((high - low) / 8))
    found = [
        factor * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        if power % stride == 0
        for factor in factors
    ]
    return [tick for tick in found if low - 1e-9 <= math.log10(tick) <= high + 1e-9]


def _positive(points: Sequence[tuple[float, float, float, float]]) -> list[tuple[float, float, float, float]]:
    """Points that a logarithm can show; an interval that reaches 0 or below begins at the point."""
    return [
        (x, y, low if low > 0 else y, max(y, high))
        for x, y, low, high in points
        if x > 0 and y > 0 and all(map(math.isfinite, (x, y, low, high)))
    ]


def _padded(values: Sequence[float], share: float) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    pad = share * (high - low) or 0.3
    return low - pad, high + pad
