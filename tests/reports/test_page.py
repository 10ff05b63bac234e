"""The page as text: what it says, what it escapes, how large it is, and what it does with damaged runs."""

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from tests.reports.synthetic import HOSTILE, write_comparison, write_run
from thinwire.core.errors import UserError
from thinwire.reports.charts import CHARTS, MAX_POINTS, Line, chart_lines
from thinwire.reports.figures import figure_svg, nice_ticks, value_range
from thinwire.reports.load import Run, Series, load_runs
from thinwire.reports.page import render, write_report

ONE_MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("comparison"))


@pytest.fixture(scope="module")
def page(comparison):
    return render(load_runs(comparison))


def payload(page):
    return json.loads(re.search(r'id="series">(.*?)</script>', page, re.DOTALL).group(1))


def without_scripts(page):
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def synthetic_run(arm, seed, num_steps):
    """Every chart's series at `num_steps` full-length readings: the largest page such a run can cause."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1, num_steps + 1)
    series = {spec.key: Series(steps, rng.uniform(0.01, 10, num_steps)) for spec in CHARTS}
    return Run(path=None, arm=arm, seed=seed, series=series)


def test_the_page_is_under_a_megabyte_for_4_arms_3_seeds_and_200_steps(page):
    assert len(page.encode()) < ONE_MEGABYTE


@pytest.mark.parametrize(("seeds", "num_steps"), [(1, 600), (2, 600), (3, 600), (4, 1000)])
def test_long_runs_stay_under_a_megabyte(tmp_path, seeds, num_steps):
    runs = [synthetic_run(arm, s, num_steps) for arm in ("dense", "exact-k", "a", "b") for s in range(seeds)]
    runs = [Run(tmp_path, r.arm, r.seed, series=r.series) for r in runs]
    assert len(render(runs).encode()) < ONE_MEGABYTE


def test_two_runs_of_600_steps_keep_every_point(tmp_path):
    """20 charts of two lines of 600 points: what a page must hold without thinning."""
    runs = [Run(tmp_path, arm, 1, series=synthetic_run(arm, 1, 600).series) for arm in ("dense", "exact-k")]
    page = render(runs)
    lines = [line for chart in payload(page)["charts"] for line in chart["lines"]]
    assert [len(line[2]) for line in lines] == [600] * 2 * len(CHARTS)
    assert "keep the lowest" not in page


def test_thinning_keeps_extremes_ends_and_only_real_readings():
    values = np.sin(np.arange(5000) / 7.0)
    values[1234], values[4321] = 9.0, -9.0
    run = Run(None, "dense", 1, series={CHARTS[0].key: Series(np.arange(5000), values)})
    (line,) = chart_lines([run], CHARTS[0])
    assert line.thinned
    assert len(line.values) <= MAX_POINTS
    assert {0, 1234, 4321, 4999} <= set(line.steps.tolist())
    assert (values[line.steps] == line.values).all()


def test_lines_of_unequal_steps_name_their_own(tmp_path):
    runs = [
        Run(tmp_path, "dense", s, series={CHARTS[0].key: Series(np.array(steps), np.array(steps) / 8)})
        for s, steps in ((1, [1, 2, 3, 4]), (2, [2, 4]))
    ]
    (chart,) = payload(render(runs))["charts"]
    assert chart["lines"] == [[0, 1, [0.125, 0.25, 0.375, 0.5]], [0, 2, [0.25, 0.5], [1, 3]]]


def test_thinning_is_said_in_the_page(tmp_path):
    runs = [Run(tmp_path, "dense", 1, series=synthetic_run("dense", 1, 1500).series)]
    assert "keep the lowest and the highest reading" in render(runs)


def test_model_text_is_escaped_everywhere(page):
    assert HOSTILE not in page
    assert "&lt;script&gt;document" in page
    # The page's own three script elements: data, library, drawing.
    assert page.count("<script") - page.split('id="series">')[1].count("<script>") == 1
    assert without_scripts(page).count("<script") == 0
    assert "<img" not in without_scripts(page)


@pytest.mark.parametrize("field", ["name", "arm"])
def test_names_from_a_run_are_escaped(tmp_path, field):
    run = load_runs(write_run(tmp_path / "run", "exact-k", 1, num_steps=20))[0]
    hostile = '"></style></script><script>alert(1)</script>'
    changed = {"arm": hostile} if field == "arm" else {"config": run.config | {"name": hostile}}
    page = render([Run(**(vars(run) | changed))])
    assert "alert(1)</script>" not in page


def test_text_that_has_no_utf8_form_is_written_all_the_same(tmp_path):
    folder = write_run(tmp_path / "run", "dense", 1, num_steps=5, response="\ud800 \x00\x1b[31m end")
    text = write_report(folder).read_text(encoding="utf-8")
    assert "end" in text
    assert "\x00" not in text
    assert "\x1b" not in text


def test_only_the_two_scripts_of_the_page_may_run_and_nothing_may_load(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    assert policy.startswith("default-src 'none';")
    assert len(re.findall("sha256-", policy)) == 2
    assert "script-src 'unsafe" not in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", without_scripts(page))
    assert not re.search(r"url\(|@import|@font-face", without_scripts(page))


def test_the_step_table_of_the_page_holds_the_means_of_the_runs(comparison, page):
    runs = [run for run in load_runs(comparison) if run.arm == "exact-k"]
    gaps = [run.get("rollout_corr/kl").at(200) for run in runs]
    last_panel = page.split("panel-2 scroll")[1]
    row = last_panel.split("exact-k</th>")[1].split("</tr>")[0]
    assert f"<td>{np.mean(gaps):.3f} <small>&plusmn; {np.std(gaps, ddof=1):.3f}</small></td>" in row
    assert [int(s) for s in re.findall(r'<label for="step-\d">step (\d+)', page)] == [1, 100, 200]


def test_asked_steps_replace_the_default_ones(comparison, tmp_path):
    page = write_report(comparison, tmp_path / "new" / "r.html", steps=[5, 50]).read_text()
    assert [int(s) for s in re.findall(r'<label for="step-\d">step (\d+)', page)] == [5, 50]


def test_charts_hold_every_reading_of_every_run_to_5_digits(comparison, page):
    data = payload(page)
    runs = load_runs(comparison)
    assert len(data["charts"]) == len(CHARTS)
    for chart, spec in zip(data["charts"], CHARTS, strict=True):
        for (arm, seed, values), run in zip(chart["lines"], runs, strict=True):
            assert (data["arms"][arm], seed) == (run.arm, run.seed)
            assert data["x"][chart["x"]] == run.get(spec.key).steps.tolist()
            # Half of the fifth significant digit.
            np.testing.assert_allclose(values, run.get(spec.key).values * spec.scale, rtol=5e-5)


def test_failed_arms_are_shaded_and_listed_with_the_rule(page):
    spans = {chart["id"]: chart["spans"] for chart in payload(page)["charts"]}
    assert [arm for arm, _, _ in spans["chart-0"]] == [2, 2, 2, 3, 3, 3]
    assert "Score cliff: the first step at which" in page
    assert "not a verdict" in page
    assert page.count("score cliff at step") == 6


def test_wire_numbers_and_shares_are_in_the_text(page):
    wire = page.split('<section id="wire">')[1].split("</section>")[0]
    assert "7.20 MB <small>100.00%</small>" in wire
    assert "360 kB <small>5.00%</small>" in wire
    # Anchor every 20 steps: 150,000 / 20 bytes a step of 7.2 MB.
    assert "7.50 kB <small>0.10%</small>" in wire


def test_an_arm_that_sends_more_than_dense_fits_its_bar(tmp_path):
    """3 MB sent against 1.5 MB dense: the bar is full, with the dense cost marked in its middle."""
    step = {"step": 1, "wire/forward_bytes": 2e6, "wire/backward_bytes": 1e6, "wire/dense_bytes": 1.5e6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    page = render(load_runs(tmp_path))
    widths = [float(width) for width in re.findall(r'class="part-\w+" style="width:([\d.]+)%', page)]
    # Three printed decimals.
    assert sum(widths) == pytest.approx(100, abs=0.001)
    assert '<b style="left:50.000%">' in page
    assert '<span class="total">200.00%</span>' in page


def test_wire_bytes_without_a_dense_cost_are_shown_without_shares(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "wire/forward_bytes": 2000}\n')
    wire = render(load_runs(tmp_path)).split('<section id="wire">')[1].split("</section>")[0]
    assert "2.00 kB" in wire
    assert "not measured" in wire
    assert "%" not in wire


def test_nan_reads_null_in_the_data_and_is_named_under_its_chart(tmp_path):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=30)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text() + '{"step": 31, "rollout_corr/kl": NaN, "actor/grad_norm": Infinity}\n'
    )
    page = render(load_runs(folder))
    gap = next(chart for chart in payload(page)["charts"] if chart["id"] == "chart-2")
    assert gap["lines"][0][2][-1] is None
    assert page.count("Not a finite number: exact-k seed 1 from step 31.") == 2
    assert "nan" not in re.findall(r'd="([^"]*)"', page)
    assert "not finite" in page


def test_a_single_run_of_one_step_has_a_page(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5, "rollout_corr/kl": NaN}\n')
    page = render(load_runs(folder))
    assert "1 arm, 1 step, 1 seed (0)." in page
    assert "Not measured in these runs: Validation." in page
    assert page.count("Not measured in these runs.") == 1
    assert "Not finished: run, seed 0 (no summary yet, 1 step)" in page


def test_a_run_with_only_the_validation_before_training_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/score": 0.58}\n')
    assert "<td>0.580 &rarr; 0.580</td>" in render(load_runs(tmp_path))


def test_runs_without_a_step_are_a_user_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="at least 1 recorded step, found 0 in 1 run"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_directory_as_output_is_a_user_error(comparison, tmp_path):
    with pytest.raises(UserError, match="must be a file"):
        write_report(comparison, tmp_path)


def test_a_failed_run_is_named_on_top(tmp_path):
    write_run(tmp_path / "exact-k" / "seed-1", "exact-k", 1, num_steps=30)
    failed = write_run(tmp_path / "subspace-20" / "seed-1", "subspace-20", 1, num_steps=12)
    (failed / "summary.json").write_text('{"arm": "subspace-20", "seed": 1, "status": "failed"}')
    page = render(load_runs(tmp_path))
    assert "Not finished: subspace-20, seed 1 (failed, 12 steps)." in page


def test_a_standalone_figure_is_well_formed_and_draws_every_run(comparison):
    svg = ElementTree.fromstring(figure_svg(load_runs(comparison), "rollout_corr/kl"))
    space = "{http://www.w3.org/2000/svg}"
    lines = [path for path in svg.iter(f"{space}path") if path.get("class").startswith("line")]
    assert len(lines) == 12
    words = [text.text for text in svg.iter(f"{space}text")]
    assert {"Train-inference gap", "dense", "exact-k", "subspace-20", "subspace-10", "step"} <= set(words)
    assert "nats a token" in words


def test_a_figure_of_an_unmeasured_series_is_a_user_error_that_lists_the_known_ones(comparison):
    with pytest.raises(UserError, match=r"got 'nope'; known: actor/entropy, .*val/score"):
        figure_svg(load_runs(comparison), "nope")


def test_svg_coordinates_are_the_readings(comparison):
    """The first path point of a line maps back to its reading to half of 0.5 in 228 units."""
    runs = load_runs(comparison)[:1]
    (line,) = chart_lines(runs, CHARTS[0])
    path = re.search(r'class="line s0" d="M(\d+) (\d+)', figure_svg(runs, CHARTS[0].key))
    low, high = value_range([line])
    value = high - (int(path.group(2)) / 2 - 10) / 228 * (high - low)
    assert value == pytest.approx(line.values[0], abs=0.25 / 228 * (high - low))


def test_ticks_are_round_and_inside():
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(0, 30.9) == [0, 10, 20, 30]
    assert nice_ticks(-0.031, 0.012) == [-0.03, -0.02, -0.01, 0, 0.01]
    assert nice_ticks(2, 2) == [2]


@pytest.mark.parametrize("values", [[0.0, 0.0], [np.nan, np.inf], [-1.0, -2.0], [1e30, 1e-30]])
def test_every_value_range_holds_zero_and_has_a_height(values):
    low, high = value_range([Line("dense", 1, np.arange(2), np.array(values))])
    assert low <= 0 <= high
    assert high > low
