"""The score cliff's false alarms and hits, the failure span, the gap slope and the step table."""

import math

import numpy as np
import pytest

from tests.reports.synthetic import score_level, write_comparison
from thinwire.reports.load import Run, Series, load_runs
from thinwire.reports.marks import (
    default_steps,
    failure_span,
    gap_slope,
    ols_slope,
    score_cliff,
    step_table,
)


def series(values, first=1):
    return Series(np.arange(first, first + len(values)), np.asarray(values, np.float64))


def run_of(arm, seed, **named):
    return Run(path=None, arm=arm, seed=seed, series={k.replace("__", "/"): v for k, v in named.items()})


def share_marked(levels, num_answers, num_trials, seed=0):
    rng = np.random.default_rng(seed)
    steps = np.arange(1, len(levels) + 1)
    scores = rng.binomial(num_answers, levels, size=(num_trials, len(levels))) / num_answers
    return np.mean([score_cliff(steps, score) is not None for score in scores])


@pytest.mark.parametrize("num_answers", [128, 256])
@pytest.mark.parametrize("num_steps", [40, 200, 600])
def test_a_flat_score_is_marked_in_at_most_1_of_300_runs(num_answers, num_steps):
    """1000 draws of this gave 0 or 1 marks at every size: 2 of 300 would be a changed rule."""
    assert share_marked(np.full(num_steps, 0.58), num_answers, 300) <= 1 / 300


@pytest.mark.parametrize("num_answers", [128, 256])
def test_a_learning_run_is_marked_in_at_most_1_of_300_runs(num_answers):
    assert share_marked(np.linspace(0.55, 0.85, 200), num_answers, 300) <= 1 / 300


def test_prompts_of_unequal_difficulty_raise_the_false_alarms_to_under_3_in_100():
    """16 prompts, success rates Beta(0.5, 0.5), 8 answers each: the noisiest step we run.

    1000 draws gave a rate of 0.006; 300 draws of a rate of 0.01 exceed 9 marks with probability 0.0003.
    """
    rng = np.random.default_rng(1)
    rates = rng.beta(0.5, 0.5, size=(300, 200, 16))
    scores = rng.binomial(8, rates).mean(axis=2) / 8
    marked = [score_cliff(np.arange(1, 201), score) is not None for score in scores]
    assert sum(marked) <= 9


@pytest.mark.parametrize("arm", ["subspace-20", "subspace-10"])
def test_a_collapse_is_marked_in_every_run_and_near_its_place(arm):
    rng = np.random.default_rng(2)
    level = score_level(arm, 200)
    fallen = int(np.argmax(level < level[0] - 0.10)) + 1
    for _ in range(50):
        cliff = score_cliff(np.arange(1, 201), rng.binomial(128, level) / 128)
        assert cliff is not None
        # A trailing mean of 10 lags by 5 steps; its noise (0.014) moves the crossing by as much again.
        assert abs(cliff.step - fallen) <= 20


def test_the_cliff_is_the_first_step_whose_ten_step_mean_has_lost_a_tenth():
    """0.6 for 30 steps, then 0.4: the mean of the last ten falls by 0.02 a step, so by 0.10 at step 35."""
    cliff = score_cliff(np.arange(1, 61), np.r_[np.full(30, 0.6), np.full(30, 0.4)])
    assert (cliff.step, cliff.best_step) == (35, 10)
    # Ten binary roundings of numbers near 0.6.
    np.testing.assert_allclose((cliff.best, cliff.level, cliff.loss), (0.6, 0.5, 0.1), rtol=0, atol=1e-14)


def test_a_dip_that_regains_half_of_its_loss_is_no_cliff():
    score = np.r_[np.full(30, 0.6), np.full(15, 0.4), np.full(30, 0.55)]
    assert score_cliff(np.arange(1, 76), score) is None


def test_a_fall_needs_ten_further_steps_to_count():
    score = np.r_[np.full(30, 0.6), np.full(14, 0.4)]
    assert score_cliff(np.arange(1, 45), score) is None
    score = np.r_[np.full(30, 0.6), np.full(15, 0.4)]
    assert score_cliff(np.arange(1, 46), score).step == 35


def test_short_empty_and_non_finite_series_have_no_cliff():
    assert score_cliff(np.zeros(0, np.int64), np.zeros(0)) is None
    assert score_cliff(np.arange(5), np.linspace(1, 0, 5)) is None
    assert score_cliff(np.arange(60), np.full(60, np.nan)) is None


def test_the_span_ends_at_the_trough_of_the_entropy_after_the_cliff():
    """Entropy is lowest (0) at steps 1-10, before the cliff; after it, steps 61-70 are lowest."""
    entropy = np.r_[np.zeros(10), np.full(50, 2.0), np.full(10, 0.1), np.full(30, 1.0)]
    span = failure_span(series(np.r_[np.full(30, 0.6), np.full(70, 0.2)]), series(entropy))
    assert (span.first, span.last) == (33, 70)


def test_the_span_of_a_run_without_entropy_ends_with_the_score():
    score = series(np.r_[np.full(30, 0.6), np.full(70, 0.2)])
    assert failure_span(score, series([])).last == 100
    assert failure_span(series(np.full(100, 0.5)), series(np.ones(100))) is None


def test_the_gap_slope_is_that_of_the_last_half_only():
    """Slope 0 up to step 100 and 0.03 a step from 101 on: exact on a straight line up to rounding."""
    gap = series(np.r_[np.full(100, 3.0), 3.0 + 0.03 * np.arange(1, 101)])
    run = run_of("subspace-20", 1, rollout_corr__kl=gap)
    assert gap_slope(run, 200) == pytest.approx(0.03, abs=1e-12)
    assert gap_slope(run, 100) == pytest.approx(0.0, abs=1e-12)
    assert gap_slope(run, 1) is None
    assert gap_slope(run, 201) is None


def test_the_slope_equals_numpys_least_squares():
    rng = np.random.default_rng(3)
    steps, values = np.array([1, 2, 5, 9, 40]), rng.standard_normal(5)
    # Two ways of the same 5-term sums in float64.
    assert ols_slope(Series(steps, values)) == pytest.approx(np.polyfit(steps, values, 1)[0], rel=1e-10)


def test_the_step_table_gives_mean_and_sample_deviation_over_seeds():
    runs = [run_of("exact-k", s, rollout_corr__kl=series([v])) for s, v in ((1, 1.0), (2, 2.0), (3, 6.0))]
    (row,) = step_table(runs, [1])
    assert row["gap"] == {"mean": 3.0, "spread": math.sqrt(7.0), "values": {"1": 1.0, "2": 2.0, "3": 6.0}}
    assert row["entropy"] == {"mean": None, "spread": None, "values": {}}


def test_a_seed_that_is_not_finite_is_not_averaged_away():
    runs = [run_of("exact-k", s, rollout_corr__kl=series([v])) for s, v in ((1, 1.0), (2, math.nan))]
    (row,) = step_table(runs, [1])
    assert row["gap"] == {"mean": None, "spread": None, "values": {"1": 1.0, "2": None}}


def test_a_run_that_stopped_early_gives_later_steps_no_reading():
    values = {"critic__score__mean": series(np.ones(50)), "val__score": series([0.5, 0.4], first=0)}
    early, late = step_table([run_of("dense", 1, **values)], [50, 60])
    assert early["validation_last"]["mean"] == 0.4
    assert late["validation_last"]["values"] == late["score"]["values"] == {}


def test_validation_is_the_first_and_the_latest_reading_up_to_the_step():
    validation = Series(np.array([0, 20, 40]), np.array([0.58, 0.5, 0.3]))
    runs = [run_of("dense", 1, val__score=validation, critic__score__mean=series(np.ones(40)))]
    rows = {row["step"]: row for row in step_table(runs, [1, 30, 40])}
    assert [rows[s]["validation_last"]["mean"] for s in (1, 30, 40)] == [0.58, 0.5, 0.3]
    assert rows[40]["validation_first"]["mean"] == 0.58


def test_wire_bytes_of_a_step_add_all_parts(tmp_path):
    rows = step_table(load_runs(write_comparison(tmp_path, seeds=(1,), num_steps=30)), [1, 2])
    sent = {(row["step"], row["arm"]): row["wire_bytes"]["mean"] for row in rows}
    assert sent[1, "subspace-20"] == 240_000 + 120_000 + 150_000 + 3_072
    assert sent[2, "subspace-20"] == sent[1, "exact-k"] == 360_000
    assert sent[1, "dense"] == 7_200_000


def test_default_steps_are_first_middle_last_common_and_last():
    runs = [run_of("dense", s, a=series(np.ones(n))) for s, n in ((1, 200), (2, 61))]
    assert default_steps(runs) == [1, 30, 61, 200]
    assert default_steps(runs[:1]) == [1, 100, 200]
    assert default_steps([run_of("dense", 1, val__score=series([0.5], first=0))]) == [0]
