"""Summaries against hand-computed numbers."""

import json
import math

import numpy as np
import pytest

from thinwire.train.summary import (
    compare_summary,
    interval,
    quarter_marks,
    run_summary,
    slope_over_last_half,
    step_table,
    wire_bytes,
)


def rows(num_steps, slope=0.01, level=2.0, validation=(0.5, 0.6)):
    lines = [{"step": 0, "val/score": validation[0]}]
    for step in range(1, num_steps + 1):
        lines.append(
            {
                "step": step,
                "critic/score/mean": step / 100,
                "rollout_corr/kl": level + slope * step,
                "actor/kl_loss": 0.001 * step,
                "actor/entropy": 1.5,
                "actor/pg_clipfrac": 0.25,
                "actor/pg_clipfrac_lower": 0.125,
                "wire/forward_bytes": 300.0,
                "wire/backward_bytes": 100.0,
                "wire/anchor_bytes": 1000.0 if step == 1 else 0.0,
                "wire/side_channel_bytes": 8.0 if step == 1 else 0.0,
                "wire/dense_bytes": 8000.0,
            }
        )
    lines[-1]["val/score"] = validation[1]
    return lines


def test_a_run_is_summarised_by_its_own_lines():
    summary = run_summary(rows(8), "demo", "exact-k", 3, "done", 12.5)
    assert {k: summary[k] for k in ("name", "arm", "seed", "status", "steps", "seconds")} == {
        "name": "demo", "arm": "exact-k", "seed": 3, "status": "done", "steps": 8, "seconds": 12.5,
    }  # fmt: skip
    assert summary["score"] == {"first": 0.01, "last": 0.08}
    assert summary["validation"] == {"first": 0.5, "last": 0.6, "best": 0.6}
    assert summary["wire"] == {"bytes_per_step": 400.0 + 1008.0 / 8, "dense_bytes_per_step": 8000.0}
    assert list(summary["at"]) == ["2", "4", "6", "8"]
    at = summary["at"]["8"]
    assert at["gap_slope"] == pytest.approx(0.01, abs=1e-12)  # an exact line in float64
    assert (at["entropy"], at["clip_fraction"], at["dual_clip_fraction"]) == (1.5, 0.25, 0.125)
    assert (at["gap"], at["reference_kl"], at["wire_bytes"]) == (2.0 + 0.01 * 8, 0.001 * 8, 400.0)


def test_the_slope_is_ols_over_the_later_half_of_the_steps_up_to_the_one_asked_for():
    noise = np.random.default_rng(0).normal(size=41)
    lines = [{"step": step, "rollout_corr/kl": float(noise[step])} for step in range(41)]
    for last in (7, 20, 40):
        steps = np.array([step for step in range(41) if last / 2 < step <= last])
        expected = np.polyfit(steps, noise[steps], 1)[0]
        # both are least squares in float64 on at most 20 points
        assert slope_over_last_half(lines, "rollout_corr/kl", last) == pytest.approx(expected, rel=1e-9)


def test_a_slope_needs_two_finite_readings():
    assert slope_over_last_half(rows(1), "rollout_corr/kl", 1) is None
    lines = [{"step": step, "x": value} for step, value in ((3, 1.0), (4, math.nan), (5, 3.0), (6, math.inf))]
    assert slope_over_last_half(lines, "x", 6) is None
    assert slope_over_last_half(lines, "x", 5) == 1.0


def test_the_steps_asked_for_are_quarter_marks_or_the_callers():
    assert quarter_marks(200) == [50, 100, 150, 200]
    assert quarter_marks(3) == [1, 2, 3]
    assert quarter_marks(1) == [1]
    assert quarter_marks(0) == []
    assert list(run_summary(rows(8), "d", None, 1, "done", 0.0, at_steps=(5, 99))["at"]) == ["5"]


def test_a_summary_is_strict_json_whatever_was_logged():
    lines = rows(4)
    lines[-1]["rollout_corr/kl"] = math.nan
    del lines[-2]["actor/kl_loss"]
    summary = run_summary(lines, "d", None, 1, "failed", 0.0)
    json.dumps(summary, allow_nan=False)
    assert summary["at"]["4"]["gap"] is None
    assert summary["at"]["3"]["reference_kl"] is None
    assert run_summary([], "d", None, 1, "interrupted", 0.0)["at"] == {}


def test_wire_bytes_are_the_sum_of_what_was_sent_and_none_when_nothing_was_counted():
    assert wire_bytes({"wire/forward_bytes": 3.0, "wire/anchor_bytes": 4.0}) == 7.0
    assert wire_bytes({"critic/score/mean": 1.0}) is None


def test_means_over_seeds_carry_their_spread_and_the_pooled_slope_its_interval():
    slopes = (0.01, 0.02, 0.06)
    runs = [run_summary(rows(8, s), "demo", "a", seed, "done", 1.0) for seed, s in enumerate(slopes)]
    failed = run_summary(rows(5, 9.0), "demo", "b", 0, "failed", 1.0)
    summary = compare_summary("demo", [*runs, failed])
    pooled = summary["arms"]["a"]["mean"]["at"]["8"]["gap_slope"]
    # n = 3, t(0.975, 2 degrees) = 4.302653 from any table; 1e-6 is the table's own rounding
    margin = 4.302653 * np.std(slopes, ddof=1) / math.sqrt(3)
    assert pooled["mean"] == pytest.approx(0.03, abs=1e-9)
    assert pooled["std"] == pytest.approx(np.std(slopes, ddof=1), abs=1e-9)
    assert (pooled["low"], pooled["high"]) == pytest.approx((0.03 - margin, 0.03 + margin), abs=1e-6)
    assert (summary["status"], summary["arms"]["a"]["status"]) == ("failed", "done")
    assert summary["arms"]["b"]["mean"]["at"] == {}  # a failed run enters no mean
    assert summary["arms"]["b"]["seeds"]["0"]["steps"] == 5
    json.dumps(summary, allow_nan=False)


def test_one_seed_has_a_mean_but_neither_spread_nor_interval():
    summary = compare_summary("demo", [run_summary(rows(4), "demo", "a", 7, "done", 1.0)])
    pooled = summary["arms"]["a"]["mean"]["at"]["4"]["gap_slope"]
    assert pooled["n"] == 1
    assert pooled["std"] is pooled["low"] is pooled["high"] is None
    assert interval([]) == {"low": None, "high": None}


def test_the_table_has_a_row_an_arm_and_dashes_where_nothing_was_measured():
    done = run_summary(rows(8), "demo", "a", 1, "done", 1.0)
    failed = run_summary([], "demo", "b", 1, "failed", 1.0)
    header, first, second = step_table(compare_summary("demo", [done, failed]))
    assert len(header) == len(first) == len(second)
    assert first[:3] == ["a", "1/1", "0.500 -> 0.600"]
    assert second[:3] == ["b", "0/1 failed", "- -> -"]
