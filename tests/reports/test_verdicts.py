"""The report says which arm is stationary, by the instruments' verdict, over one or several folders."""

import numpy as np
import pytest

from tests.reports.synthetic import write_comparison, write_run
from thinwire.core.errors import UserError
from thinwire.instruments.verdict import rule, verdict
from thinwire.reports import verdicts
from thinwire.reports.load import load_runs, load_together
from thinwire.reports.page import render, write_report


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("week") / "first")


def test_every_run_has_the_word_of_the_instrument_and_the_rule_is_printed(comparison):
    runs = load_runs(comparison)
    page = verdicts.section(runs, ["dense", "exact-k", "subspace-20", "subspace-10"])
    words = [verdicts.run_verdict(run).word for run in runs]
    for run, word in zip(runs, words, strict=True):
        series = {key: (found.steps, found.values) for key, found in run.series.items()}
        assert word == verdict(series).word
    assert page.count("COLLAPSED") == words.count("COLLAPSED") + rule().count("COLLAPSED")
    assert {word for run, word in zip(runs, words, strict=True) if run.arm == "subspace-20"} == {"COLLAPSED"}
    assert "COLLAPSED" not in {
        word for run, word in zip(runs, words, strict=True) if "subspace" not in run.arm
    }
    assert "Hartung" in page


def test_the_pooled_slope_of_seeds_lies_among_them(comparison):
    runs = [run for run in load_runs(comparison) if run.arm == "subspace-20"]
    slopes = [verdicts.gap_slope(run).value for run in runs]
    pooled = verdicts.pooled_gap_slope(runs)
    assert pooled.num_runs == 3
    assert min(slopes) <= pooled.slope.value <= max(slopes)
    assert np.mean(slopes) == pytest.approx(pooled.slope.value, rel=0.1)
    assert verdicts.pooled_gap_slope(runs[:1]) is None


def test_folders_with_the_same_arm_and_seed_are_told_apart_by_name(comparison, tmp_path):
    second = write_run(tmp_path / "second", "dense", 1, 60)
    third = write_run(tmp_path / "third", "dense", 9, 60)
    assert {run.arm for run in load_together([second, third])} == {"dense"}
    arms = {run.arm for run in load_together([comparison, second])}
    assert {"first: dense", "second: dense"} <= arms
    page = render(load_together([comparison, second]))
    assert "second: dense" in page


def test_one_folder_twice_is_refused(comparison, tmp_path):
    with pytest.raises(UserError, match="twice"):
        load_together([comparison, comparison])


def test_several_folders_are_reported_here_unless_told_where(comparison, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    second = write_run(tmp_path / "second", "dense", 1, 60)
    assert write_report([comparison, second]).resolve() == tmp_path / "report.html"
    assert write_report([comparison, second], tmp_path / "week.html") == tmp_path / "week.html"
