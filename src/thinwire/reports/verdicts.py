"""Which arm is stationary, and why: the verdict on every run, slopes pooled over seeds, every rule."""

import html
from collections.abc import Sequence

from thinwire.instruments.pooling import POOL_RULE, POOLED_CONFIDENCE, Pooled, pool
from thinwire.instruments.stationarity import despike
from thinwire.instruments.trend import MIN_POINTS, Estimate, fit_trend
from thinwire.instruments.verdict import GAP, Verdict, rule, verdict
from thinwire.reports.load import Run
from thinwire.reports.sections import chip


def run_verdict(run: Run) -> Verdict:
    """The verdict on all steps of one run, from its training steps alone."""
    return verdict({key: (series.steps, series.values) for key, series in run.series.items()})


def verdict_text(run: Run) -> str:
    """The verdict and its reasons on one line."""
    found = run_verdict(run)
    needed = f", about {found.steps_needed} more steps needed" if found.steps_needed else ""
    return f"{found.word}{needed}: {'; '.join(found.reasons)}"


def section(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """A row a run: the word and its reasons; then the pooled gap slope of every arm, and the rules."""
    rows = []
    for run in runs:
        found = run_verdict(run)
        needed = f"; about {found.steps_needed} more steps" if found.steps_needed else ""
        reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in found.reasons)
        rows.append(
            f"<tr><th>{chip(arms, run.arm)}</th><td>{run.seed}</td><td class=text>{found.word}{needed}</td>"
            f'<td class="text why"><details><summary>why</summary><ul class="plain">{reasons}</ul></details>'
            "</td></tr>"
        )
    head = "<th>Arm</th><th>Seed</th><th class=text>Verdict</th><th class=text>Reasons</th>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return (
        f'<div class="scroll">{table}</div>{_pooled(runs, arms)}'
        f'<details class="note"><summary>The rule</summary><p>{html.escape(rule())}</p>'
        f"<p>{html.escape(POOL_RULE)}</p></details>"
    )


def gap_slope(run: Run) -> Estimate | None:
    """The slope of the gap over all training steps, None where it has too few finite readings."""
    gap = run.get(GAP).finite()
    if len(gap) < MIN_POINTS:
        return None
    return fit_trend(gap.steps, despike(gap.values)[0]).slope()


def pooled_gap_slope(runs: Sequence[Run]) -> Pooled | None:
    """Random-effects mean of the runs' gap slopes, None below two."""
    slopes = [slope for slope in map(gap_slope, runs) if slope is not None]
    return pool(slopes) if len(slopes) > 1 else None


def _pooled(runs: Sequence[Run], arms: Sequence[str]) -> str:
    rows = []
    for arm in arms:
        found = pooled_gap_slope([run for run in runs if run.arm == arm])
        if found is not None:
            low, high = found.interval()
            cells = (str(found.num_runs), f"{found.slope.value:+.5f}", f"{low:+.5f} to {high:+.5f}")
            texts = "".join(f"<td>{cell}</td>" for cell in cells)
            rows.append(f"<tr><th>{chip(arms, arm)}</th>{texts}</tr>")
    if not rows:
        return ""
    names = (
        "Arm",
        "Seeds",
        "Gap slope<small>nats a step, whole run</small>",
        f"{POOLED_CONFIDENCE:.0%} interval",
    )
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'
