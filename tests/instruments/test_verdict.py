"""The verdict on fixtures with known answers, and that it never reads the lens."""

import numpy as np
import pytest

from tests.instruments.series import GAP, GRAD_NORM, SCORE, VALIDATION, autoregressive, run
from thinwire.instruments.verdict import GAP_MAGNITUDE, READ, rule, verdict, worst


def share(word, num_seeds, **how):
    return np.mean([verdict(run(seed, **how)).word == word for seed in range(num_seeds)])


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_level_learning_run_is_stationary(correlation):
    """1000 seeds gave 97% or more at both (benchmarks/false_alarms.py)."""
    assert share("STATIONARY", 100, correlation=correlation) >= 0.9


def test_a_trend_in_autocorrelated_noise_is_drifting():
    """0.005 a step, AR(1) 0.9 of deviation 0.3, 600 steps: power 99% or more."""
    assert share("DRIFTING", 50, correlation=0.9, slope=0.005) >= 0.9


def test_a_slow_curvature_is_accelerating():
    """From level to 0.01 a step over 400 steps."""
    assert share("ACCELERATING", 50, num_steps=400, correlation=0.5, curvature=0.005 / 400) >= 0.9


def test_a_gap_that_falls_and_then_climbs_is_accelerating_although_its_mean_slope_is_flat():
    series = run(num_steps=400)
    steps, gap = series[GAP]
    series[GAP] = (steps, gap + 5e-5 * (steps - 200.0) ** 2)
    assert verdict(series).word == "ACCELERATING"


def test_a_gap_that_levels_off_is_drifting_and_says_so():
    series = run(num_steps=600)
    steps, gap = series[GAP]
    series[GAP] = (steps, gap + 10 * (1 - np.exp(-steps / 100)))
    found = verdict(series)
    assert found.word in ("DRIFTING", "ACCELERATING")
    assert found.word == "DRIFTING"


def test_a_score_cliff_is_a_collapse_whatever_the_gap_does():
    series = run()
    steps, score = series[SCORE]
    series[SCORE] = (steps, score - 0.3 * (steps > 400))
    found = verdict(series)
    assert found.word == "COLLAPSED"
    assert "cliff at step 40" in found.reasons[0]


def test_a_cliff_names_the_trough_of_the_dense_entropy_where_there_is_one():
    series = run()
    steps, score = series[SCORE]
    series[SCORE] = (steps, score - 0.3 * (steps > 300))
    entropy = 1.0 - 0.9 * ((steps > 400) & (steps <= 420))
    series["probe/entropy_dense"] = (steps, entropy)
    assert "probe/entropy_dense lowest at step 410" in verdict(series).reasons[0]


def test_a_cliff_after_the_window_is_not_seen_and_one_before_it_is():
    series = run()
    steps, score = series[SCORE]
    series[SCORE] = (steps, score - 0.4 * (steps > 500))
    assert verdict(series, window=(1, 480)).word == "STATIONARY"
    series[SCORE] = (steps, score - 0.4 * (steps > 100))
    assert verdict(series, window=(200, 600)).word == "COLLAPSED"


def test_one_spike_of_the_gradient_norm_does_not_change_a_verdict():
    series = run(3)
    before = verdict(series)
    series[GRAD_NORM][1][590] = 80.0
    after = verdict(series)
    assert before.word == after.word == "STATIONARY"
    assert "1 spikes clipped" in after.reasons[1]


@pytest.mark.parametrize("key", [GAP, GRAD_NORM])
def test_a_drift_of_either_alone_is_drifting(key):
    series = run(4)
    steps, values = series[key]
    for sign in (1, -1):
        changed = series | {key: (steps, values + sign * 0.004 * steps)}
        found = verdict(changed)
        assert found.word == "DRIFTING"
        assert any(key in reason and "drifting" in reason for reason in found.reasons)


def test_a_flat_run_that_does_not_learn_is_not_learning():
    assert share("NOT LEARNING", 30, rise=0.0) >= 0.9


def test_learning_may_lie_before_the_window_and_may_be_seen_in_validation_alone():
    series = run(5)
    steps, _ = series[SCORE]
    level = 0.4 + 0.3 * np.minimum(1, steps / 200)
    noise = 0.02 * np.random.default_rng(0).standard_normal(600)
    assert verdict(series | {SCORE: (steps, level + noise)}, window=(300, 600)).word == "STATIONARY"
    del series[SCORE]
    series[VALIDATION] = (steps[::60], level[::60] + noise[::60])
    assert verdict(series).word == "STATIONARY"


@pytest.mark.parametrize("missing", [GAP, GRAD_NORM, SCORE])
def test_without_one_of_its_series_no_run_is_stationary(missing):
    series = run(6)
    del series[missing]
    found = verdict(series)
    assert found.word == "TOO SHORT"
    assert any(missing in reason and "no finite reading" in reason for reason in found.reasons)


def test_the_lens_is_never_read():
    """Whatever the codec-view KL and entropy do, the verdict is the same value."""
    series = run(7)
    steps = series[GAP][0]
    wild = {key: (steps, np.exp(steps / 50.0)) for key in ("actor/kl_loss", "actor/entropy", "probe/kl_gain")}
    assert verdict(series | wild) == verdict(series)
    assert not {"actor/kl_loss", "actor/entropy", "actor/kl_unclamped", "actor/pg_clipfrac"} & set(READ)


def test_a_short_window_says_how_many_more_steps_it_needs():
    series = run(8, num_steps=30)
    found = verdict(series)
    assert (found.word, found.steps_needed) == ("TOO SHORT", 20)
    series = run(8, num_steps=100, correlation=0.5, noise=0.6)
    found = verdict(series)
    assert found.word == "TOO SHORT"
    # That many more steps of the same kind decide it in most runs.
    longer = [verdict(run(s, 100 + found.steps_needed, 0.5, noise=0.6)).word for s in range(40)]
    assert np.mean([word == "STATIONARY" for word in longer]) >= 0.7


def test_a_smaller_slope_asked_for_needs_a_longer_run():
    series = run(9, num_steps=300, correlation=0.5)
    assert verdict(series, slope=0.01).word == "STATIONARY"
    asked = verdict(series, slope=1e-4)
    assert asked.word == "TOO SHORT"
    assert asked.steps_needed > 300
    assert "0.0001 (--slope)" in asked.rule


def test_a_series_that_ends_in_nan_is_a_collapse():
    series = run(10)
    series[GAP][1][-5:] = np.nan
    found = verdict(series)
    assert found.word == "COLLAPSED"
    assert "its last 5 readings are not finite" in found.reasons[0]
    series[GAP][1][-5:-1] = 3.0
    assert verdict(series).word == "STATIONARY"


def test_a_random_walk_is_not_called_stationary():
    """Its mean slope may be 0; its level never settles. None of 100 walks of a tenth of a nat a step."""
    steps = np.arange(1, 601)
    words = [
        verdict(
            run(s) | {GAP: (steps, 3 + 0.1 * np.random.default_rng(s).standard_normal(600).cumsum())}
        ).word
        for s in range(100)
    ]
    assert words.count("STATIONARY") <= 5


def test_the_magnitude_that_trl_logs_stands_in_for_the_gap():
    series = run(11)
    series[GAP_MAGNITUDE] = series.pop(GAP)
    found = verdict(series)
    assert found.word == "STATIONARY"
    assert found.reasons[0].startswith(GAP_MAGNITUDE)


@pytest.mark.parametrize("series", [{}, {GAP: ([], [])}, {GAP: ([1], [2.0]), SCORE: ([1], [np.nan])}])
def test_nothing_or_one_point_is_too_short(series):
    assert verdict(series).word == "TOO SHORT"


def test_the_rule_names_every_word_and_the_worst_seed_speaks_for_an_arm():
    for word in ("STATIONARY", "DRIFTING", "ACCELERATING", "COLLAPSED", "NOT LEARNING", "TOO SHORT"):
        assert word in rule()
    assert worst(["STATIONARY", "TOO SHORT", "DRIFTING"]) == "DRIFTING"


def test_noise_of_few_independent_readings_is_judged_with_doubled_intervals():
    series = {GAP: (np.arange(60), 3 + autoregressive(1, 60, 0.95)), **run(12, num_steps=60)}
    series[GAP] = (np.arange(1, 61), 3 + autoregressive(1, 60, 0.95))
    assert any("independent readings, interval doubled" in reason for reason in verdict(series).reasons)
