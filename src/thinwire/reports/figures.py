"""Charts as SVG: inline for a page without scripts and for print, standalone for a document."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import UserError
from thinwire.reports.charts import (
    CHARTS,
    Band,
    ChartSpec,
    Line,
    Shade,
    chart_bands,
    chart_lines,
    chart_spans,
    palette_css,
    step_range,
)
from thinwire.reports.load import Run, arm_names

_FONT = "-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
# The SVG's size in its own units and the plot area inside it.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 280, 62, 18, 10, 42
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


def figure_svg(runs: Sequence[Run], key: str) -> str:
    """One chart as a standalone SVG file for light and dark ground: title, axes, legend, all arms."""
    spec = next((s for s in CHARTS if s.key == key), ChartSpec(key, key, "", ""))
    lines = chart_lines(runs, spec)
    if not lines:
        raise UserError(f"figure key must be a series of these runs, got {key!r}; known: {_known(runs)}")
    arms = arm_names(runs)
    head, foot = 34, 34
    style = (
        palette_css(arms, "svg")
        + f"svg{{font-family:{_FONT};background:var(--ground)}}"
        + svg_css(len(arms))
        + ".title{font-size:17px;font-weight:600;fill:var(--text)}.legend{font-size:14px;fill:var(--text)}"
    )
    over = Overlays(chart_spans(runs, spec), chart_bands(runs, spec))
    body = _chart_body(lines, over, spec, arms, step_range(runs))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + head + foot}" '
        f'width="{WIDTH}" height="{HEIGHT + head + foot}" role="img"><title>{html.escape(spec.title)}</title>'
        f'<style>{style}</style><rect class="ground" width="100%" height="100%" rx="6"/>'
        f'<text class="title" x="14" y="25">{html.escape(spec.title)}</text>'
        f'<g transform="translate(0 {head})">{body}</g>{_legend(arms, HEIGHT + head + 18)}</svg>\n'
    )


def inline_svg(
    lines: Sequence[Line], over: "Overlays", spec: ChartSpec, arms: list[str], steps: tuple[int, int]
) -> str:
    """The chart for a page without scripts and for print; colours come from the page's own style."""
    label = html.escape(f"{spec.title}, {spec.unit}, against step")
    body = _chart_body(lines, over, spec, arms, steps)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{body}</svg>'


def svg_css(num_arms: int) -> str:
    """Rules that inline and standalone charts share."""
    arms = "".join(f".s{i}{{stroke:var(--arm-{i})}}.f{i}{{fill:var(--arm-{i})}}" for i in range(num_arms))
    return arms + (
        ".line{fill:none;stroke-width:3;stroke-linejoin:round}.line.thin{stroke-width:2.2}.dot{fill:none;stroke-width:9;stroke-linecap:round}"
        ".mark{fill:none;stroke-width:1.5;stroke-dasharray:3 3}.level{stroke:var(--muted)}"
        ".grid{stroke:var(--rule);stroke-width:1}.tick{font-size:13px;fill:var(--muted)}.ground{fill:var(--ground)}"
    )


def nice_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high], about `target` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def value_range(lines: Sequence[Line]) -> tuple[float, float]:
    """(low, high) of the y axis: it always holds 0, so that levels can be compared by eye."""
    values = np.concatenate([line.values for line in lines])
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    pad = 0.05 * (max(high, 0.0) - min(low, 0.0)) or 1.0
    return low - pad if low < 0 else 0.0, high + pad if high > 0 or low >= 0 else 0.0


@dataclass(frozen=True)
class _Axes:
    """Maps steps and values to the SVG's units."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: NDArray[np.float64] | float) -> NDArray[np.float64]:
        return np.asarray(LEFT + (np.asarray(step) - self.first) / (self.last - self.first) * _PLOT_WIDTH)

    def y(self, value: NDArray[np.float64] | float) -> NDArray[np.float64]:
        return np.asarray(TOP + (self.high - np.asarray(value)) / (self.high - self.low) * _PLOT_HEIGHT)


@dataclass(frozen=True)
class Overlays:
    """What a chart shows besides its lines: failure spans, bands over seeds, (arm, step) of actions."""

    spans: Sequence[Shade] = ()
    bands: Sequence[Band] = ()
    marks: Sequence[tuple[str, int]] = ()


def _chart_body(
    lines: Sequence[Line], over: Overlays, spec: ChartSpec, arms: list[str], steps: tuple[int, int]
) -> str:
    """Spans, bands, marks, grid, axes, lines; coordinates are whole half-units, finer than a pixel."""
    axes = _Axes(steps[0], max(steps[1], steps[0] + 1), *value_range(lines))
    parts = []
    opacity = 0.09 / max(1, len({line.seed for line in lines}))
    for arm, start, end in over.spans:
        left, right = float(axes.x(start)), float(axes.x(end))
        box = f'x="{left:.1f}" y="{TOP}" width="{max(right - left, 1):.1f}" height="{_PLOT_HEIGHT}"'
        parts.append(f'<rect class="f{arms.index(arm)}" opacity="{opacity:.3f}" {box}/>')
    for band in over.bands:
        x = 2 * axes.x(np.concatenate([band.steps, band.steps[::-1]]).astype(np.float64))
        y = 2 * axes.y(np.concatenate([band.low, band.high[::-1]]))
        shape = f'transform="scale(.5)" d="{_path(x, y, False)}z"'
        parts.append(f'<path class="f{arms.index(band.arm)}" opacity=".16" {shape}/>')
    if spec.level is not None and axes.low <= spec.level <= axes.high:
        y_level = f"{float(axes.y(spec.level)):.1f}"
        parts.append(f'<path class="mark level" d="M{LEFT} {y_level}h{_PLOT_WIDTH}"/>')
    for arm, step in over.marks:
        x_mark = f"{float(axes.x(step)):.1f}"
        parts.append(f'<path class="mark s{arms.index(arm)}" d="M{x_mark} {TOP}v{_PLOT_HEIGHT}"/>')
    parts += _axis_marks(axes, spec.unit)
    thin = " thin" if len(lines) > len(arms) else ""
    parts.append('<g transform="scale(.5)">')
    for line in lines:
        x, y = 2 * axes.x(line.steps.astype(np.float64)), 2 * axes.y(line.values)
        slot = arms.index(line.arm)
        parts.append(f'<path class="line s{slot}{thin}" d="{_path(x, y, spec.points)}"/>')
        dots = _dots(x, y, every=spec.points and len(x) <= 60)
        parts.append(f'<path class="dot s{slot}" d="{dots}"/>' if dots else "")
    return "".join(parts) + "</g>"


def _axis_marks(axes: _Axes, unit: str) -> list[str]:
    parts = []
    for tick in nice_ticks(axes.low, axes.high):
        y = f"{float(axes.y(tick)):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {y}h{_PLOT_WIDTH}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y}" dy=".35em" text-anchor="end">{tick:.10g}</text>'
        )
    middle = 'text-anchor="middle"'
    for tick in nice_ticks(axes.first, axes.last, 6):
        x = f"{float(axes.x(tick)):.1f}"
        parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 22}" {middle}>{tick:.10g}</text>')
    centre_x, centre_y = LEFT + _PLOT_WIDTH // 2, TOP + _PLOT_HEIGHT // 2
    parts.append(f'<text class="tick" x="{centre_x}" y="{HEIGHT - 4}" {middle}>step</text>')
    turned = f'transform="translate(14 {centre_y}) rotate(-90)" {middle}'
    parts.append(f'<text class="tick" {turned}>{html.escape(unit)}</text>')
    return parts


def _path(x: NDArray[np.float64], y: NDArray[np.float64], over_gaps: bool) -> str:
    """Relative whole-number path. A reading that is not finite breaks the line unless `over_gaps`."""
    commands: list[str] = []
    pen: tuple[int, int] | None = None
    for px, py in zip(x, y, strict=True):
        if not math.isfinite(py):
            pen = pen if over_gaps else None
            continue
        here = (round(px), round(py))
        to = f"M{here[0]} {here[1]}" if pen is None else f"l{here[0] - pen[0]} {here[1] - pen[1]}"
        commands.append(to.replace(" -", "-"))
        pen = here
    return "".join(commands)


def _dots(x: NDArray[np.float64], y: NDArray[np.float64], every: bool) -> str:
    """Zero-length strokes: at every finite reading, or only where a line of one point would not show."""
    finite = np.isfinite(y)
    alone = finite & ~np.r_[False, finite[:-1]] & ~np.r_[finite[1:], False]
    shown = finite if every else alone
    return "".join(f"M{round(px)} {round(py)}h0" for px, py in zip(x[shown], y[shown], strict=True))


def _known(runs: Sequence[Run]) -> str:
    return ", ".join(sorted({key for run in runs for key in run.series})) or "none, no step is recorded"


def _legend(arms: Sequence[str], y: int) -> str:
    parts, x = [], LEFT
    for i, arm in enumerate(arms):
        parts.append(f'<rect class="f{i}" x="{x}" y="{y - 5}" width="18" height="4" rx="2"/>')
        parts.append(f'<text class="legend" x="{x + 25}" y="{y}" dy=".1em">{html.escape(arm)}</text>')
        x += 51 + 8 * len(arm)
    return "".join(parts)
