"""The report: one HTML file that opens offline, with charts that survive without scripts.

The page makes no request: a content security policy refuses every source, and lets exactly the two
scripts written here run, by their hashes. All text from runs is escaped; model text may hold anything.
"""

import base64
import hashlib
import html
import json
import math
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
from numpy.typing import NDArray

import thinwire
from thinwire.core.errors import UserError
from thinwire.reports import actions, figures, heatmap, sections, verdicts
from thinwire.reports.charts import (
    CHARTS,
    MAX_POINTS,
    ChartSpec,
    Line,
    chart_bands,
    chart_lines,
    chart_spans,
    palette_css,
    step_range,
)
from thinwire.reports.load import Run, arm_names, load_together
from thinwire.reports.marks import CLIFF_RULE, default_steps, run_span

MAX_PAGE_BYTES = 1_000_000
MIN_POINTS = 60
# Heading and lead of each group of charts, in the order of the page.
GROUPS = {
    "learning": ("Learning", ""),
    "stability": (
        "Stability",
        "Read the slope, not the level: a large settled gap works, a small rising one is a countdown.",
    ),
    "lens": (
        "Through the lens, and without it",
        "A reading through the codec mixes the weights with the codec. Compare arms only with the codec off.",
    ),
    "clipping": ("Clipping", "The clip bounds one step, not the sum of many."),
    "parts": (
        "Where the gap comes from",
        "Both parts count from the run's first step and add up to the gap's change.",
    ),
    "growth": (
        "Error growth",
        "Does the wire throw away the same thing twice? From the codec's mean error at every boundary.",
    ),
    "movement": (
        "Weight movement",
        "Against the start. Dashed level line: below 0.195% of itself a bf16 weight rounds back.",
    ),
    "controller": ("Controller", "Dashed upright lines mark the steps after which it changed a setting."),
}
# Groups left out where nothing of them was measured, instead of a line that says so.
OPTIONAL = ("parts", "growth", "movement", "controller")


def write_report(
    runs_dir: Path | str | Sequence[Path], out: Path | str | None = None, steps: Sequence[int] = ()
) -> Path:
    """Write the report of run or compare directories, completely or not at all; returns its path.

    `out` defaults to report.html in `runs_dir`, or here where several are given. `steps` are those of the
    step table, by default the first, the middle and the last one.
    """
    folders = [Path(runs_dir)] if isinstance(runs_dir, Path | str) else list(runs_dir)
    default = folders[0] if len(folders) == 1 else Path()
    path = Path(out) if out is not None else default / "report.html"
    refuse_target(path)
    page = render(load_together(folders), steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # Lone surrogates in model text have no UTF-8 form and become question marks.
    partial.write_text(page, encoding="utf-8", errors="replace")
    os.replace(partial, path)
    return path


def refuse_target(path: Path) -> None:
    """A report replaces only a report: an existing file must be a regular one named .html."""
    if path.is_dir():
        raise UserError(f"report --out must be a file, got the directory {str(path)!r}; add a file name")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"report --out must be a regular file, got {str(path)!r}; name another")
    if path.exists() and path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"report --out {str(path)!r} exists and is no .html file; name another")


def render(runs: Sequence[Run], steps: Sequence[int] = ()) -> str:
    """The page of these runs as one string under 1 MB: where runs are many, lines have fewer points."""
    shown = [run for run in runs if run.series]
    if not shown:
        raise UserError(
            f"report DIR must hold at least 1 recorded step, found 0 in {sections.count(len(runs), 'run')}; "
            "wait for the first step"
        )
    max_points = MAX_POINTS
    page = _page(runs, shown, steps, max_points)
    while len(page.encode("utf-8", errors="replace")) >= MAX_PAGE_BYTES and max_points > MIN_POINTS:
        max_points = max(MIN_POINTS, max_points * 2 // 3)
        page = _page(runs, shown, steps, max_points)
    return page


def _page(runs: Sequence[Run], shown: Sequence[Run], steps: Sequence[int], max_points: int) -> str:
    arms = arm_names(shown)
    library, script = _static("uPlot.iife.min.js"), _static("report.js")
    charts, payload = _charts(shown, arms, max_points)
    return Template(_static("page.html")).substitute(
        version=thinwire.__version__,
        policy=_policy(library, script),
        style=_style(arms),
        title=html.escape(_title(shown)),
        lead=html.escape(_lead(shown, arms)),
        unfinished=sections.unfinished(runs),
        facts=sections.facts(shown),
        arms="".join(_arm_button(arms, arm) for arm in arms),
        tables=sections.tables(shown, arms, list(steps) or default_steps(shown)),
        verdicts=verdicts.section(shown, arms),
        charts=charts,
        wire=sections.wire(shown, arms),
        rollouts=sections.samples(shown, arms),
        reading=_static("reading.html"),
        notes=sections.notes(runs),
        payload=payload,
        library=library,
        script=script,
    )


def _static(name: str) -> str:
    return files("thinwire.reports").joinpath("static", name).read_text(encoding="utf-8")


def _style(arms: Sequence[str]) -> str:
    parts = (palette_css(arms), figures.svg_css(len(arms)), _static("report.css"))
    return "\n".join((_static("uPlot.min.css"), *parts))


def _policy(*scripts: str) -> str:
    """Refuse every source; run only these scripts, named by the hash of their text."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    styles = "style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {styles}; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _arm_button(arms: Sequence[str], arm: str) -> str:
    return f'<button type="button" aria-pressed="true" disabled>{sections.chip(arms, arm)}</button>'


def _title(runs: Sequence[Run]) -> str:
    names = {str(run.config.get("name") or run.path.resolve().name) for run in runs}
    return names.pop() if len(names) == 1 else ", ".join(arm_names(runs))


def _lead(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """One sentence: arms, steps, seeds."""
    seeds, lengths = sorted({run.seed for run in runs}), sorted({run.last_step for run in runs})
    steps = f"{lengths[0]} to {lengths[-1]} steps" if len(lengths) > 1 else sections.count(lengths[0], "step")
    listed = ", ".join(map(str, seeds))
    return f"{sections.count(len(arms), 'arm')}, {steps}, {sections.count(len(seeds), 'seed')} ({listed})."


def _charts(runs: Sequence[Run], arms: list[str], limit: int) -> tuple[str, str]:
    """The sections with all measured charts, and the data that the script draws them from, as JSON."""
    html_parts: list[str] = []
    shared_steps: list[list[int]] = []
    charts: list[str] = []
    thinned = False
    acted = actions.marks(runs)
    for group, (heading, lead) in GROUPS.items():
        figures_html, missing = [], []
        for spec in (s for s in CHARTS if s.group == group):
            lines = chart_lines(runs, spec, limit)
            if not lines:
                missing.append(spec.title)
                continue
            thinned |= any(line.thinned for line in lines)
            over = figures.Overlays(
                chart_spans(runs, spec), chart_bands(runs, spec), acted if spec.marks else ()
            )
            chart_id = f"chart-{len(charts)}"
            picture = figures.inline_svg(lines, over, spec, arms, step_range(runs))
            figures_html.append(_figure(chart_id, spec, lines, picture))
            charts.append(_chart_json(chart_id, spec, lines, over, arms, shared_steps))
        if figures_html or group not in OPTIONAL:
            after = actions.table(runs, arms) if group == "controller" else ""
            html_parts.append(_chart_section(group, heading, lead, figures_html, missing, after))
    html_parts.append(heatmap.section(runs, arms))
    html_parts.append(_marks(runs, arms, limit if thinned else None))
    seeds = sorted({run.seed for run in runs})
    fields = {"arms": arms, "seeds": seeds, "steps": step_range(runs), "x": shared_steps}
    head = json.dumps(fields, separators=(",", ":"))
    payload = f'{head[:-1]},"charts":[{",".join(charts)}]}}'
    return "".join(html_parts), payload.replace("<", "\\u003c")


def _chart_section(
    group: str, heading: str, lead: str, charts: list[str], missing: list[str], after: str = ""
) -> str:
    parts = [f'<section id="{group}"><h2>{heading}</h2>', f'<p class="muted">{lead}</p>' if lead else ""]
    parts.append(f'<div class="grid2">{"".join(charts)}</div>' if charts else "")
    if missing:
        parts.append(f'<p class="note">Not measured in these runs: {html.escape("; ".join(missing))}.</p>')
    return "".join(parts) + after + "</section>"


def _figure(chart_id: str, spec: ChartSpec, lines: Sequence[Line], picture: str) -> str:
    """Caption, place for the script's drawing, and the same chart as SVG."""
    broken = [
        f"{line.arm} seed {line.seed} from step {int(line.steps[~np.isfinite(line.values)][0])}"
        for line in lines
        if not np.isfinite(line.values).all()
    ]
    warning = f'<p class="note">Not a finite number: {html.escape("; ".join(broken))}.</p>' if broken else ""
    lens = sections.tag("lens") if spec.lens else ""
    return (
        f'<figure id="{chart_id}"><figcaption><h3>{html.escape(spec.title)}</h3>{lens}'
        f'<span class="note">{html.escape(spec.note)}</span></figcaption><div class="plot" hidden></div>'
        f'<div class="values"></div><div class="fallback">{picture}</div>'
        f"{warning}</figure>"
    )


def _chart_json(
    chart_id: str,
    spec: ChartSpec,
    lines: Sequence[Line],
    over: figures.Overlays,
    arms: list[str],
    shared_steps: list[list[int]],
) -> str:
    """One chart's data: values of 5 significant digits on a step axis that charts share where it is equal.

    A line is [arm, seed, values] at every step of the axis, or [arm, seed, values, indices into the axis]; a
    span [arm, first step, last step], a mark [arm, step], a band [arm, steps, lowest, highest].
    """
    axis = np.unique(np.concatenate([line.steps for line in lines]))
    steps = axis.tolist()
    if steps not in shared_steps:
        shared_steps.append(steps)
    rows = []
    for line in lines:
        where = np.searchsorted(axis, line.steps)
        places = "" if len(where) == len(axis) else f",{json.dumps(where.tolist(), separators=(',', ':'))}"
        rows.append(f"[{arms.index(line.arm)},{line.seed},{_numbers(line.values)}{places}]")
    shades = [[arms.index(arm), first, last] for arm, first, last in over.spans]
    marks = [[arms.index(arm), step] for arm, step in over.marks]
    bands = [
        f"[{arms.index(b.arm)},{json.dumps(b.steps.tolist(), separators=(',', ':'))},"
        f"{_numbers(b.low)},{_numbers(b.high)}]"
        for b in over.bands
    ]
    fields = {"id": chart_id, "unit": spec.unit, "points": spec.points, "level": spec.level, "spans": shades}
    fields["marks"] = marks
    head = json.dumps(fields | {"x": shared_steps.index(steps)}, separators=(",", ":"))
    return f'{head[:-1]},"bands":[{",".join(bands)}],"lines":[{",".join(rows)}]}}'


def _numbers(values: NDArray[np.float64]) -> str:
    """A JSON list with 5 significant digits; JSON has no NaN, so what is not finite reads null."""
    return "[" + ",".join(f"{v:.5g}" if math.isfinite(v) else "null" for v in values.tolist()) + "]"


def _marks(runs: Sequence[Run], arms: Sequence[str], limit: int | None) -> str:
    """What is shaded, the rule that found it, and what it must not be used for."""
    entries = []
    for run in runs:
        span = run_span(run)
        if span:
            entries.append(
                f"<li>{sections.chip(arms, run.arm)}, seed {run.seed}: score cliff at step {span.first} "
                f"({span.cliff.best:.3f} up to step {span.cliff.best_step}, then {span.cliff.level:.3f}); "
                f"entropy trough at step {span.last}</li>"
            )
    found = f'<ul class="plain">{"".join(entries)}</ul>' if entries else "<p>No score fell by this rule.</p>"
    thinned = (
        f"<p class=note>Lines of more than {limit} points keep the lowest and the highest reading of each of "
        f"{limit // 2} stretches of steps.</p>"
        if limit
        else ""
    )
    return (
        f'<section id="marks"><h2>Shaded spans</h2>{found}<p class="note">{html.escape(CLIFF_RULE)} '
        f"A span is a mark on the picture, not a verdict: its end is a reading of the lens.</p>"
        f"{thinned}</section>"
    )
