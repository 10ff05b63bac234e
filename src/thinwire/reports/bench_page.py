"""bench.json and the page of a bench: gap against bits, and the tables. Loads no torch."""

import html
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import thinwire
from thinwire.reports.charts import ARM_COLOURS, OTHER_COLOURS, palette_css
from thinwire.reports.figures import svg_css
from thinwire.reports.loglog import Curve, loglog_svg

SLOTS = [*ARM_COLOURS, *(f"other {i}" for i in range(len(OTHER_COLOURS)))]
"""One name a colour of the palette: a curve takes them in turn."""


def write_bench(found: Mapping[str, Any], out: Path) -> Path:
    """Write bench.json and bench.html into a directory, and return the page."""
    return write_page(found, out, "bench", render_bench(found))


def write_page(found: Mapping[str, Any], out: Path, name: str, page: str) -> Path:
    """NAME.json and NAME.html, each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(dict(found), indent=1) + "\n"), (".html", page)):
        partial = out / f"{name}{suffix}.partial"
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, out / f"{name}{suffix}")
    return out / f"{name}.html"


def render_bench(found: Mapping[str, Any]) -> str:
    """The page: one chart of gap against bits a value, and a table of the codecs."""
    labels = list(dict.fromkeys(row["label"] for row in (*found["codecs"], *found["sweep"])))
    body = (
        f"<section><h2>Gap against bits</h2>{bench_chart(found, labels)}"
        '<p class="note">Both axes logarithmic; bars are 95% intervals; a gap of 0 cannot be shown.</p>'
        "</section>"
        f"<section><h2>At the asked budget</h2>{_table(found['codecs'])}</section>"
    )
    return page(f"Codecs on {found['model']['source']}", lead(found), body)


def bench_chart(found: Mapping[str, Any], labels: Sequence[str]) -> str:
    """Every codec a line through its budgets."""
    curves = []
    for slot, label in enumerate(labels):
        rows = [row for row in (*found["codecs"], *found["sweep"]) if row["label"] == label]
        points = {
            row["bits_per_value"]: (row["gap"]["mean"], row["gap"]["low"], row["gap"]["high"])
            for row in reversed(rows)  # the full reading wins over the sweep's
        }
        curves.append(Curve(label, [(bits, *gap) for bits, gap in sorted(points.items())], slot))
    return loglog_svg(curves, "bits a value, each way", "gap, nats a token")


def lead(found: Mapping[str, Any]) -> str:
    model, scored, teaching = found["model"], found["scored"], found["statistics"]
    blocks = ", ".join(map(str, model["boundaries"]))
    return (
        f"Width {model['width']}, boundaries after blocks {blocks}. {scored['response_tokens']} response "
        f"tokens of {scored['rollouts']} rollouts scored, statistics of {teaching['tokens']} tokens of "
        f"{teaching['rollouts']} others."
    )


def page(title: str, lead_text: str, body: str) -> str:
    """A page that needs nothing else: inline style, no script."""
    style = "\n".join(
        (
            palette_css(SLOTS),
            svg_css(len(SLOTS)),
            files("thinwire.reports").joinpath("static", "report.css").read_text(encoding="utf-8"),
            ".whisker{fill:none;stroke-width:1.5;opacity:.7}.hollow{fill:var(--ground);stroke-width:2}"
            ".name{font-size:13px}",
        )
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="generator" content="thinwire {thinwire.__version__}">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<header>"
        f'<p class="eyebrow">thinwire codecs</p><h1>{html.escape(title)}</h1>'
        f'<p class="lead">{html.escape(lead_text)}</p></header>\n<main>\n{body}\n</main>\n</body>\n</html>\n'
    )


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    lines = "".join(
        f"<tr><th>{html.escape(first)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            row["label"],
            f"{row['bits_per_value']:.3g}",
            f"{row['gap']['mean']:.4g} ({row['gap']['low']:.4g} to {row['gap']['high']:.4g})",
            f"{row['kl']['mean']:.4g}",
            f"{row['entropy']['view']:.4g}",
            _text(row["gradient"]["cosine"]),
            _text(row["gradient"]["norm_ratio"]),
            f"{row['microseconds_per_token']['share_of_layer']:.1%}",
        ]
        for row in rows
    ]
    headers = (
        "codec",
        "bits a value",
        "gap, nats (95%)",
        "KL(dense || view)",
        "view entropy",
        "gradient cosine",
        "gradient norm ratio",
        "time, of a layer",
    )
    return html_table(headers, cells)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
