"""The controller's actions in a report: read, marked, told with their reasons, escaped."""

import json
import re

import pytest

from tests.reports.synthetic import HOSTILE, write_run
from thinwire.reports import actions
from thinwire.reports.charts import CHARTS, chart_bands
from thinwire.reports.load import load_run
from thinwire.reports.page import render


@pytest.fixture
def run(tmp_path):
    return load_run(write_run(tmp_path / "run", "subspace-20", 1, 60, HOSTILE))


def test_actions_are_read_and_broken_lines_skipped(run):
    (action,) = actions.load_actions(run)
    assert (action.step, action.actuator, action.old, action.new) == (
        20,
        "view_alignment_weight",
        "0",
        "0.03",
    )
    assert actions.marks([run, run]) == [("subspace-20", 20)]


def test_the_page_marks_the_step_and_gives_the_reason_escaped(run):
    page = render([run])
    payload = json.loads(re.search(r'id="series">(.*?)</script>', page, re.S)[1])
    marked = [chart["id"] for chart in payload["charts"] if chart["marks"] == [[0, 20]]]
    assert len(marked) == sum(spec.marks for spec in CHARTS)
    assert "error growth &lt;exponent&gt; 0.97" in page
    assert HOSTILE not in page


def test_a_controlled_run_without_actions_was_left_alone(tmp_path):
    run = load_run(write_run(tmp_path / "run", "exact-k", 3, 30))
    assert "Left alone: exact-k, seed 3" in actions.table([run], ["exact-k"])
    assert actions.marks([run]) == []


def test_runs_without_probe_growth_and_controller_have_no_empty_sections(tmp_path):
    folder = write_run(tmp_path / "run", "dense", 1, 30)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plain = [
        {
            k: v
            for k, v in row.items()
            if k.split("/")[0] not in ("probe", "error_growth", "controller", "movement")
        }
        for row in rows
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    page = render([load_run(folder)])
    for heading in ("Controller", "Error growth", "Weight movement", "Where the gap comes from"):
        assert f"<h2>{heading}</h2>" not in page


def test_a_band_holds_every_reading_of_its_seeds_and_touches_the_extremes(tmp_path):
    runs = [load_run(write_run(tmp_path / f"{seed}", "exact-k", seed, 200 + seed)) for seed in (1, 2, 3)]
    spec = CHARTS[0]
    (band,) = chart_bands(runs, spec)
    assert (band.steps[0], band.steps[-1], len(band.steps)) == (1, 201, 120)
    for run in runs:
        series = run.get(spec.key).between(1, 201)
        bucket = band.steps.searchsorted(series.steps, side="right") - 1
        inside = bucket < len(band.steps) - 1  # the last point stands at the last step of its bucket
        assert (series.values[inside] >= band.low[bucket[inside]]).all()
        assert (series.values[inside] <= band.high[bucket[inside]]).all()
    assert band.low.min() == min(run.get(spec.key).between(1, 201).values.min() for run in runs)
    assert chart_bands(runs[:1], spec) == []
