"""growth.json and the page of the growth law: accumulated error against steps. Loads no torch."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.reports.bench_page import html_table, page, write_page
from thinwire.reports.loglog import Curve, loglog_svg


def write_growth(found: Mapping[str, Any], out: Path) -> Path:
    """Write growth.json and growth.html into a directory, and return the page."""
    return write_page(found, out, "growth", render_growth(found))


def render_growth(found: Mapping[str, Any]) -> str:
    """A chart a codec, one line for each hold, between T and sqrt(T), and the readings as tables."""
    body = "".join(
        f"<section><h2>{html.escape(row['label'])}</h2>"
        f"{growth_chart(row, found['steps'])}{_table(row)}</section>"
        for row in found["codecs"]
        if row["held"][0]["curve"]
    )
    model = found["model"]
    lead = (
        f"{model['source']}, width {model['width']}: the same {found['scored']['tokens']} tokens cross every "
        f"boundary {found['steps']} times. What a codec draws and learns is held L steps, then renewed; a "
        f"state is relearned from {found['chunk_rollouts']} rollouts, {found['learning_chunks']} sets in "
        "turn. Sum of the mean errors over all windows of T steps, root mean square, in units of one step's."
    )
    return page("How errors add up", lead, body)


def growth_chart(row: Mapping[str, Any], steps: int) -> str:
    """Lines of one codec with T and sqrt(T) dashed."""
    far = steps / 2
    references = [
        Curve("T", [(1.0, 1.0, 1.0, 1.0), (far, far, far, far)], dashed=True),
        Curve("sqrt T", [(1.0, 1.0, 1.0, 1.0), (far, far**0.5, far**0.5, far**0.5)], dashed=True),
    ]
    curves = [
        Curve(_held(one), [(lag, value, value, value) for lag, value in one["curve"]], slot)
        for slot, one in enumerate(row["held"])
    ]
    return loglog_svg([*references, *curves], "steps T", "accumulated error over one step's")


def _table(row: Mapping[str, Any]) -> str:
    headers = (
        "held",
        "renewals",
        "exponent",
        "prefactor of sqrt(L T)",
        "effective hold",
        "cosine",
        "one step's error over |h|",
        "T/2 steps' error over |h|",
    )
    keys = ("exponent", "prefactor", "effective_hold", "cosine", "step_error", "accumulated")
    return html_table(
        headers,
        [
            [_held(one), str(one["renewals"])]
            + ["-" if one[key] is None else f"{one[key]:.3g}" for key in keys]
            for one in row["held"]
        ],
    )


def _held(one: Mapping[str, Any]) -> str:
    return "for good" if one["for_good"] else f"L = {one['hold']}"
