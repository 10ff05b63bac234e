"""Where the weights moved: relative change by block and step, one inline SVG a run, from movement.jsonl."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.reports.load import Run
from thinwire.reports.readings import Notes, json_lines
from thinwire.reports.sections import chip

LEFT, TOP, BOTTOM, WIDTH, ROW = 64, 6, 34, 720, 18
MAX_COLUMNS = 120
BF16_LINE = 2.0**-9
"""0.195%: a bf16 weight that changes by less of itself rounds back (`instruments.movement.BF16_LINE`)."""


@dataclass(frozen=True)
class Moves:
    """|dW|_F / |W_0|_F of every block (rows) at every read step (columns); None where it was not readable."""

    steps: list[int]
    blocks: list[int]
    change: list[list[float | None]]


def load_moves(run: Run) -> Moves | None:
    """The heat map's values, thinned to MAX_COLUMNS steps; None where movement was not recorded."""
    rows: dict[int, dict[int, float]] = {}
    for _, record in json_lines(run.path / "movement.jsonl", Notes()):
        step, blocks = record.get("step"), record.get("blocks")
        if isinstance(step, int) and isinstance(blocks, list):
            rows[step] = dict(cell for cell in map(_cell, blocks) if cell is not None)
    steps = sorted(rows)
    stride = -(-len(steps) // MAX_COLUMNS) or 1
    steps = steps[::-1][::stride][::-1]  # the last one stays
    blocks = sorted({block for step in steps for block in rows[step]})
    if not blocks:
        return None
    return Moves(steps, blocks, [[rows[step].get(block) for step in steps] for block in blocks])


def section(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """One heat map a run on a common scale, or "" where no run recorded its movement."""
    found = [(run, moves) for run in runs if (moves := load_moves(run)) is not None]
    if not found:
        return ""
    highest = max((v for _, m in found for row in m.change for v in row if v is not None), default=0.0)
    figures = [
        f"<figure><figcaption><h3>{chip(arms, run.arm)}, seed {run.seed}</h3></figcaption>"
        f"{heatmap_svg(moves, highest)}</figure>"
        for run, moves in found
    ]
    return (
        '<section id="heatmap"><h2>Where the weights moved</h2><p class="muted">Relative change of each '
        f"block since the start, by step: pale is none, full colour {highest:.3%}. Outlined cells lie below "
        f"{BF16_LINE:.3%}, the change that a weight held in bf16 may lose to rounding.</p>"
        f'<div class="grid2">{"".join(figures)}</div></section>'
    )


def heatmap_svg(moves: Moves, highest: float) -> str:
    """Cells of opacity change / highest, each with its reading as a title; block 0 at the bottom."""
    height = TOP + ROW * len(moves.blocks) + BOTTOM
    width = (WIDTH - LEFT - 8) / len(moves.steps)
    parts = []
    for row, (block, values) in enumerate(zip(moves.blocks, moves.change, strict=True)):
        y = TOP + ROW * (len(moves.blocks) - 1 - row)
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{block}</text>')
        for column, (step, value) in enumerate(zip(moves.steps, values, strict=True)):
            if value is None:
                continue
            opacity = 0.04 + 0.96 * value / highest if highest else 0.04
            low = " low" if value < BF16_LINE else ""
            x, cell = LEFT + column * width, max(width - 1, 0.5)
            box = f'x="{x:.1f}" y="{y}" width="{cell:.1f}" height="{ROW - 1}"'
            title = f"<title>block {block}, step {step}: {value:.3%}</title>"
            parts.append(f'<rect class="heat{low}" fill-opacity="{opacity:.3f}" {box}>{title}</rect>')
    for column in sorted({0, len(moves.steps) // 2, len(moves.steps) - 1}):
        x, y = LEFT + (column + 0.5) * width, height - 18
        step = moves.steps[column]
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{step}</text>')
    parts.append(f'<text class="tick" x="{LEFT}" y="{height - 3}">block (rows) by step (columns)</text>')
    label = html.escape("relative change of each block by step")
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _cell(block: object) -> tuple[int, float] | None:
    """(block, relative change) of one entry; None for anything that is not two finite numbers."""
    if not isinstance(block, dict):
        return None
    number, value = block.get("block"), block.get("relative_change")
    if isinstance(number, bool) or not isinstance(number, int) or isinstance(value, bool):
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return number, float(value)
