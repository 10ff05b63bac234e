"""What a run's controller did: events.jsonl as values, the marks on its charts, and a table of reasons."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.reports.load import Run
from thinwire.reports.readings import Notes, json_lines
from thinwire.reports.sections import chip, count

MAX_ROWS = 40


@dataclass(frozen=True)
class Action:
    """One change of a setting, with the reason the controller gave."""

    step: int
    actuator: str
    old: str
    new: str
    reason: str


def load_actions(run: Run) -> list[Action]:
    """The controller's actions in the order of the file; lines that are none are skipped."""
    actions = []
    for _, record in json_lines(run.path / "events.jsonl", Notes()):
        step = record.get("step")
        if record.get("event") == "controller" and isinstance(step, int):
            old, new = _value(record.get("from")), _value(record.get("to"))
            actions.append(Action(step, str(record.get("actuator")), old, new, str(record.get("reason", ""))))
    return actions


def marks(runs: Sequence[Run]) -> list[tuple[str, int]]:
    """(arm, step) of every step after which a setting changed, once each."""
    found = [(run.arm, action.step) for run in runs for action in load_actions(run)]
    return list(dict.fromkeys(found))


def table(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """Every action with its reason; a line for controlled runs that were left alone; "" without any."""
    rows, left_alone, num_left_out = [], [], 0
    for run in runs:
        actions = load_actions(run)
        if not actions and len(run.get("controller/demand")):
            left_alone.append(run.label)
        num_left_out += max(0, len(actions) - MAX_ROWS)
        for action in actions[:MAX_ROWS]:
            cells = (str(run.seed), str(action.step), action.actuator, f"{action.old} to {action.new}")
            texts = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            texts += f"<td class=text>{html.escape(action.reason)}</td>"
            rows.append(f"<tr><th>{chip(arms, run.arm)}</th>{texts}</tr>")
    parts = []
    if rows:
        names = ("Arm", "Seed", "After step", "Setting", "Change")
        head = "".join(f"<th>{name}</th>" for name in names) + "<th class=text>Reason</th>"
        body = "".join(rows)
        parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )
    if num_left_out:
        parts.append(f'<p class="note">{count(num_left_out, "more action")} in events.jsonl.</p>')
    if left_alone:
        parts.append(f'<p class="note">Left alone: {html.escape("; ".join(left_alone))}.</p>')
    return "".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return str(value)
