"""The parts of the report that are text and tables: facts, step table, wire, sampled answers, notes."""

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from thinwire.reports.load import WIRE_PARTS, Rollout, Run, load_rollouts, lookup
from thinwire.reports.marks import step_table

MAX_TEXT = 700
# Column of the step table: key, heading, unit, decimals, factor, read through the codec.
Column = tuple[str, str, str, int, int, bool]
COLUMNS: tuple[Column, ...] = (
    ("reference_kl", "Reference KL", "nats", 3, 1, True),
    ("gap", "Train-inference gap", "nats", 3, 1, False),
    ("gap_slope", "Gap slope, last half", "nats a step", 5, 1, False),
    ("entropy", "Codec-view entropy", "nats", 3, 1, True),
    ("clip_fraction", "Clipped tokens", "%", 2, 100, False),
    ("dual_clip_fraction", "Dual clip", "%", 2, 100, False),
    ("kl_dense", "Reference KL, codec off", "nats", 3, 1, False),
    ("entropy_dense", "Entropy, codec off", "nats", 3, 1, False),
)
# An absent setting is not shown: recipes of other versions may name theirs differently.
FACTS = (
    ("Model", "model.path"),
    ("Compute type", "model.dtype"),
    ("Stages", "model.stages"),
    ("Task", "task.name"),
    ("Prompts a step", "sampling.prompts"),
    ("Answers a prompt", "sampling.group_size"),
    ("Learning rate", "optimizer.learning_rate"),
    ("Learning rate", "optimizer.lr"),
)


def chip(arms: Sequence[str], arm: str) -> str:
    """An arm's name with its colour."""
    colour = f"var(--arm-{list(arms).index(arm)})"
    return f'<span class="swatch" style="background:{colour}"></span>{html.escape(arm)}'


def tag(name: str) -> str:
    return f'<span class="lens">{name}</span>'


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def facts(runs: Sequence[Run]) -> str:
    """What was run; a setting that differs between runs shows all its values."""
    compressed = [run for run in runs if not run.is_dense_control]
    entries: list[tuple[str, list[Any]]] = [
        (name, [lookup(r.config, dotted) for r in runs]) for name, dotted in FACTS
    ]
    entries.append(("Boundaries after layers", [lookup(r.environment, "model.boundaries") for r in runs]))
    entries.append(("Bits a value", [_bits_per_value(run) for run in compressed]))
    entries.append(("Bits a token, a boundary", [_bits_per_token(run) for run in compressed]))
    entries.append(("Forward + backward", [_budget(run) for run in compressed]))
    cells = []
    for name, values in entries:
        known = list(dict.fromkeys(_plain(value) for value in values if value is not None))
        if known:
            cells.append(f"<div><dt>{name}</dt><dd>{html.escape(' / '.join(known))}</dd></div>")
    return f'<dl class="facts">{"".join(cells)}</dl>' if cells else ""


def tables(runs: Sequence[Run], arms: Sequence[str], steps: Sequence[int]) -> str:
    """The step table once a step, one shown at a time; the choice needs no script."""
    rows = step_table(runs, steps)
    columns = [c for c in COLUMNS if any(row[c[0]]["values"] for row in rows)]
    tabs, panels, rules = [], [], []
    for i, step in enumerate(steps):
        checked = " checked" if i == len(steps) - 1 else ""
        tabs.append(f'<input type="radio" name="step" id="step-{i}"{checked}>')
        tabs.append(f'<label for="step-{i}">step {step}</label>')
        rules.append(f"#step-{i}:checked~.panel-{i}{{display:block}}")
        body = "".join(_table_row(row, columns, arms) for row in rows if row["step"] == step)
        table = f"<table>{_table_head(columns)}<tbody>{body}</tbody></table>"
        panels.append(f'<div class="panel panel-{i} scroll">{table}</div>')
    spread = "&plusmn; is the sample standard deviation over seeds. " if _several_seeds(rows) else ""
    return (
        f'<style>{"".join(rules)}</style><div class="tabs">{"".join(tabs)}{"".join(panels)}</div>'
        f'<p class="note">Readings of exactly this step; validation: the first reading, and the latest '
        f"one up to this step. {spread}{tag('lens')} marks readings through the codec.</p>"
    )


def wire(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """Bytes a step of each arm by part, mean over its steps and seeds, against dense traffic."""
    means = {arm: _wire_means([run for run in runs if run.arm == arm]) for arm in arms}
    measured = {arm: mean for arm, mean in means.items() if mean is not None}
    if not measured:
        return '<p class="note">Not measured in these runs.</p>'
    # A bar's full width, in units of the dense cost: an anchor or wider numbers may exceed it.
    full = max([1.0, *(sum(parts.values()) / dense for parts, dense in measured.values() if dense)])
    bars, rows = [], []
    for arm in arms:
        if arm not in measured:
            bars.append(f'<span>{chip(arms, arm)}</span><span class="note">not measured</span><span></span>')
            continue
        parts, dense = measured[arm]
        bars.append(_bar(arms, arm, parts, dense, full))
        cells = [_bytes_of_dense(parts[p], dense) for p in WIRE_PARTS]
        cells += [_bytes_of_dense(sum(parts.values()), dense), _bytes(dense) if dense else "not measured"]
        rows.append(f"<tr><th>{chip(arms, arm)}</th>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    names = {p: p.replace("_", " ") for p in WIRE_PARTS}
    keys = "".join(f'<li><i class="part-{p}"></i>{name}</li>' for p, name in names.items())
    heads = "".join(f"<th>{name.capitalize()}</th>" for name in (*names.values(), "all sent", "dense"))
    full_bar = "A full bar" if full == 1.0 else "The upright mark in a bar"
    return (
        f'<p class="muted">Bytes a step over all boundaries, mean over steps and seeds. {full_bar} is what '
        "dense forward and backward would cost at 2 bytes a value.</p>"
        f'<ul class="keys">{keys}</ul><div class="bars">{"".join(bars)}</div><div class="scroll"><table>'
        f"<thead><tr><th>Arm</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def samples(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """The first recorded answer of the first and of the last recorded step, for one seed of each arm."""
    cards = []
    for arm in arms:
        for run in (run for run in runs if run.arm == arm):
            rollouts = load_rollouts(run)
            if rollouts:
                cards += [_sample(rollout, run, arms) for rollout in rollouts]
                break
    return f'<div class="samples">{"".join(cards)}</div>' if cards else '<p class="note">None recorded.</p>'


def unfinished(runs: Sequence[Run]) -> str:
    """A visible line for runs that are still going, failed or were stopped; nothing when all are done."""
    open_runs = [
        run for run in runs if (run.summary or {}).get("status", "done" if run.summary else "") != "done"
    ]
    if not open_runs:
        return ""
    listed = "; ".join(
        f"{run.label} ({(run.summary or {}).get('status', 'no summary yet')}, {count(run.last_step, 'step')})"
        for run in open_runs
    )
    return f'<p class="unfinished">Not finished: {html.escape(listed)}.</p>'


def notes(runs: Sequence[Run]) -> str:
    """The seeds and steps of every arm, and whatever reading a run left out."""
    grouped: dict[tuple[str, int, tuple[str, ...]], list[int]] = {}
    for run in runs:
        grouped.setdefault((run.arm, run.last_step, run.notes), []).append(run.seed)
    items = []
    for (arm, last_step, remarks), seeds in grouped.items():
        words = [f"{arm}, {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}: "]
        words.append("; ".join([count(last_step, "step"), *_shortened(remarks)]))
        items.append(f"<li>{html.escape(''.join(words))}</li>")
    return f'<ul class="plain">{"".join(items)}</ul>'


def _shortened(remarks: Sequence[str], most: int = 5) -> list[str]:
    extra = [f"and {len(remarks) - most} more remarks"] if len(remarks) > most else []
    return list(remarks[:most]) + extra


def _several_seeds(rows: Sequence[dict[str, Any]]) -> bool:
    return any(len(row["seeds"]) > 1 for row in rows)


def _table_head(columns: Sequence[Column]) -> str:
    cells = "".join(
        f"<th>{head} {tag('lens') if lens else ''}<small>{unit}</small></th>"
        for _, head, unit, _, _, lens in columns
    )
    return f"<thead><tr><th>Arm</th>{cells}<th>Validation<small>first, latest</small></th></tr></thead>"


def _table_row(row: dict[str, Any], columns: Sequence[Column], arms: Sequence[str]) -> str:
    cells = [_cell(row, key, decimals, factor) for key, _, _, decimals, factor, _ in columns]
    first = row["validation_first"]
    start = "" if first["mean"] is None else f"{first['mean']:.3f} &rarr; "
    cells.append(start + _cell(row, "validation_last", 3))
    return f"<tr><th>{chip(arms, row['arm'])}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _cell(row: dict[str, Any], key: str, decimals: int, factor: float = 1) -> str:
    """Mean and spread over seeds; says so where not every seed was read, or a reading is not finite."""
    column = row[key]
    measured, spread = len(column["values"]), column["spread"]
    if column["mean"] is None:
        return f"<small>{'not finite' if measured else 'not measured'}</small>"
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    mean = f"{round(factor * column['mean'], decimals) + 0.0:{'+' if key == 'gap_slope' else ''}.{decimals}f}"
    around = f" <small>&plusmn; {factor * spread:.{decimals}f}</small>" if spread is not None else ""
    part = f"<br><small>{measured} of {count(len(row['seeds']), 'seed')}</small>"
    return mean + around + (part if measured < len(row["seeds"]) else "")


def _wire_means(runs: Sequence[Run]) -> tuple[dict[str, float], float | None] | None:
    """(bytes a step by part, dense bytes a step) over all steps of these runs."""
    totals = [total for total in (run.wire_totals() for run in runs) if total is not None]
    steps = sum(total.num_steps for total in totals)
    if not steps:
        return None
    known = [total.dense_bytes for total in totals if total.dense_bytes]
    parts = {part: sum(total.parts[part] for total in totals) / steps for part in WIRE_PARTS}
    return parts, sum(known) / steps if len(known) == len(totals) else None


def _bar(arms: Sequence[str], arm: str, parts: dict[str, float], dense: float | None, full: float) -> str:
    colour = f"var(--arm-{list(arms).index(arm)})"
    pieces = [
        f'<i class="part-{part}" style="width:{100 * size / (dense * full):.3f}%;background:{colour}"></i>'
        for part, size in parts.items()
        if dense and size > 0
    ]
    mark = f'<b style="left:{100 / full:.3f}%"></b>' if full > 1.0 else ""
    return (
        f'<span>{chip(arms, arm)}</span><div class="bar">{"".join(pieces)}{mark}</div>'
        f'<span class="total">{_percent(sum(parts.values()), dense)}</span>'
    )


def _percent(size: float, dense: float | None) -> str:
    return f"{100 * size / dense:.2f}%" if dense else ""


def _bytes_of_dense(size: float, dense: float | None) -> str:
    return f"{_bytes(size)} <small>{_percent(size, dense)}</small>" if size else "0"


def _bytes(size: float) -> str:
    """Decimal units, 3 significant digits."""
    power = min(max(int(math.log10(size) // 3), 0), 5) if size >= 1 else 0
    value = size / 1000**power
    decimals = 0 if power == 0 else max(0, 2 - int(math.log10(value)))
    return f"{value:.{decimals}f} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def _sample(rollout: Rollout, run: Run, arms: Sequence[str]) -> str:
    facts_shown = [f"seed {run.seed}, step {rollout.step}"]
    if rollout.score is not None:
        facts_shown.append(f"score {rollout.score:g}")
    if rollout.finished is False:
        facts_shown.append("cut at the length limit")
    if rollout.answer:
        facts_shown.append(f"right answer {_text(rollout.answer, 80)}")
    return (
        f'<article class="sample"><h3><span>{chip(arms, run.arm)}</span>'
        f'<span class="note">{", ".join(facts_shown)}</span></h3>'
        f'<pre class="prompt">{_text(rollout.prompt)}</pre>'
        f"<pre>{_text(rollout.response) or '(empty)'}</pre></article>"
    )


def _text(raw: str, most: int = MAX_TEXT) -> str:
    """Escaped model text: control characters become a replacement sign, long texts are cut."""
    printable = "".join(c if c >= " " or c in "\n\t" else "\ufffd" for c in raw[:most])
    cut = f"\n... {len(raw) - most:,} more characters" if len(raw) > most else ""
    return html.escape(printable) + cut


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bits_per_value(run: Run) -> float | None:
    readings = run.get("wire/bits_per_value").values
    return float(f"{np.median(readings):.3g}") if len(readings) else None


def _bits_per_token(run: Run) -> int | None:
    """bits a value x width where the width is recorded, else 16 bits for each value the codec keeps."""
    readings, hidden = run.get("wire/bits_per_value").values, lookup(run.environment, "model.hidden_size")
    if len(readings) and isinstance(hidden, int):
        return round(float(np.median(readings)) * hidden)
    field = {"exact-k": "codec.keep", "subspace": "codec.subspace_dim"}.get(lookup(run.config, "codec.name"))
    kept = lookup(run.config, field) if field else None
    return 16 * kept if isinstance(kept, int) else None


def _budget(run: Run) -> str | None:
    totals = run.wire_totals()
    share = totals and totals.share_of_dense(totals.parts["forward"] + totals.parts["backward"])
    return f"{100 * share:.1f}% of dense" if share else None
