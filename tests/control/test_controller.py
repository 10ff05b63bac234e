"""The controller as a pure function: bounds, rates, hysteresis, and how seldom it acts without cause."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from thinwire.control import ControllerConfig, ControlState, Plant, Settings, decide
from thinwire.control.controller import dense_kl_bound
from thinwire.core.errors import UserError

RECIPE = Settings(kl_coefficient=0.001, view_alignment_weight=0.0, anchor_cadence=20)
SUBSPACE = Plant(600, RECIPE, compresses=True, learns=True)
EXACT_K = Plant(600, RECIPE, compresses=True, bits_per_value=0.5)
DENSE = Plant(600, RECIPE, compresses=False)
ON = ControllerConfig(on=True)


def follow(config, plant, steps):
    """All decisions on a sequence of readings."""
    state, decisions = ControlState(), []
    for readings in steps:
        decisions.append(decide(config, plant, state, readings))
        state = decisions[-1].state
    return decisions


def gap(values, **others):
    return [
        {"rollout_corr/kl": float(v), "actor/grad_norm": 1.0 + 0.01 * (i % 2), **others}
        for i, v in enumerate(values)
    ]


def ar1(rho, num, seed, sd=0.05, level=2.0):
    noise = np.random.default_rng(seed).standard_normal(num + 200) * sd * np.sqrt(1 - rho**2)
    values = np.zeros(num + 200)
    for i in range(1, len(values)):
        values[i] = rho * values[i - 1] + noise[i]
    return level + values[200:]


def first_action(decisions):
    return next((d.events[0]["step"] for d in decisions if d.events), None)


def test_off_it_never_changes_a_setting():
    decisions = follow(ControllerConfig(), SUBSPACE, gap(np.linspace(2, 9, 300)))
    assert all(d.settings == RECIPE and not d.events for d in decisions)


def test_a_rising_gap_moves_the_cheapest_actuator_first_and_says_why():
    decisions = follow(ON, SUBSPACE, gap(3 + 0.01 * np.arange(200) + ar1(0.3, 200, 0, level=0)))
    events = [event for d in decisions for event in d.events]
    assert events[0]["actuator"] == "view_alignment_weight"
    assert events[0]["step"] == 60
    assert "rollout_corr/kl rises by 0.01" in events[0]["reason"]
    assert decisions[59].settings.view_alignment_weight == events[0]["to"] > 0.0
    assert decisions[58].settings == RECIPE


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_at_most_one_stationary_run_in_twenty_is_touched(rho):
    """200 runs of 600 steps, seeds fixed; the bound on the rate is 5%, 10 of 200."""
    touched = sum(
        first_action(follow(ON, EXACT_K, gap(ar1(rho, 600, seed)))) is not None for seed in range(200)
    )
    assert touched <= 10


@given(
    slopes=strategies.lists(strategies.floats(-0.05, 0.05), min_size=5, max_size=5),
    exponent=strategies.floats(0.4, 1.0),
    plant=strategies.sampled_from([SUBSPACE, EXACT_K, DENSE]),
    seed=strategies.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_bounds_and_rate_limits_hold_whatever_the_readings(slopes, exponent, plant, seed):
    config = ControllerConfig(
        on=True, bits_per_value={"limit": 2.0, "rate": 0.25}, release=0.4, release_looks=1
    )
    values = 3 + np.cumsum(np.repeat(slopes, 60)) + ar1(0.3, 300, seed, level=0.0)
    others = {"error_growth/exponent": exponent} if plant.compresses else {}
    before = plant.recipe
    for decision in follow(config, plant, gap(values, **others)):
        now = decision.settings
        assert 0.0 <= now.view_alignment_weight <= 0.1
        assert 0.001 <= now.kl_coefficient <= 0.01
        assert 0.3 <= now.learning_rate_scale <= 1.0
        assert 5 <= now.anchor_cadence <= 20
        assert now.bits_per_value is None or 0.5 <= now.bits_per_value <= 2.0
        assert abs(now.view_alignment_weight - before.view_alignment_weight) <= 0.03 + 1e-12
        assert abs(now.learning_rate_scale - before.learning_rate_scale) <= 0.25 + 1e-12
        assert 0.0 <= decision.state.demand <= 5.0
        if decision.state.step % config.look_every:
            assert now == replace(before, codec_off=False, extra_anchor=False)
        before = now


def test_the_state_survives_json():
    decisions = follow(ON, SUBSPACE, gap(3 + 0.01 * np.arange(100), **{"error_growth/exponent": 0.97}))
    state = decisions[-1].state
    loaded = json.loads(json.dumps(asdict(state)))
    windows = {key: tuple(values) for key, values in loaded.pop("windows").items()}
    assert ControlState(**{**loaded, "windows": windows, "exponents": tuple(loaded["exponents"])}) == state


def test_a_persistent_error_is_met_before_the_gap_has_moved():
    decisions = follow(ON, SUBSPACE, gap(np.full(60, 3.0), **{"error_growth/exponent": 0.97}))
    (event,) = decisions[19].events
    assert (event["actuator"], event["to"]) == ("view_alignment_weight", pytest.approx(0.03))
    assert "error growth exponent 0.97" in event["reason"]
    assert not any(d.events for d in decisions[20:])


def test_a_redrawn_mask_is_left_alone_and_the_exponent_has_a_dead_band():
    quiet = follow(ON, EXACT_K, gap(np.full(200, 3.0), **{"error_growth/exponent": 0.7}))
    assert first_action(quiet) is None
    readings = gap(np.full(40, 3.0), **{"error_growth/exponent": 0.97}) + gap(
        np.full(200, 3.0), **{"error_growth/exponent": 0.7}
    )
    assert follow(ON, SUBSPACE, readings)[-1].settings.view_alignment_weight == pytest.approx(0.03)
    readings[40:] = gap(np.full(200, 3.0), **{"error_growth/exponent": 0.55})
    assert follow(ON, SUBSPACE, readings)[-1].settings.view_alignment_weight == pytest.approx(0.0)


def test_demand_does_not_wind_up():
    """However long the alarm lasts, demand ends at the number of actuators and is given back a look later."""
    config = ControllerConfig(on=True, dense_kl={"0": 0.1}, release_looks=1, release=1.0)
    loud = gap(np.full(2000, 3.0), **{"probe/kl_dense": 9.0})
    calm = gap(np.full(200, 3.0), **{"probe/kl_dense": 0.0})
    decisions = follow(config, SUBSPACE, loud + calm)
    assert decisions[1999].state.demand == 4.0
    assert decisions[2019].state.demand == 3.0


def test_actuators_without_effect_are_not_used():
    config = ControllerConfig(on=True, dense_kl={"0": 0.1})
    moved = {
        event["actuator"]
        for d in follow(config, DENSE, gap(np.full(3000, 0.0), **{"probe/kl_dense": 9.0}))
        for event in d.events
    }
    assert moved == {"kl_coefficient", "learning_rate_scale"}


def test_the_dense_table_is_linear_between_its_steps_and_held_outside():
    config = ControllerConfig(on=True, dense_kl={"100": 0.2, "200": 0.4})
    assert [dense_kl_bound(config, step) for step in (1, 100, 150, 200, 900)] == pytest.approx(
        [0.4, 0.4, 0.6, 0.8, 0.8]
    )
    assert dense_kl_bound(ON, 5) is None


def test_one_step_actuators_last_one_step_and_keep_their_distance():
    config = ControllerConfig(on=True, dense_kl={"0": 0.1}, extra_anchor_every=40, codec_off_every=60)
    decisions = follow(config, SUBSPACE, gap(np.full(130, 3.0), **{"probe/kl_dense": 9.0}))
    assert [d.state.step for d in decisions if d.settings.extra_anchor] == [20, 60, 100]
    assert [d.state.step for d in decisions if d.settings.codec_off] == [20, 80]


def test_a_lasting_alarm_at_full_demand_stops_the_run():
    config = ControllerConfig(on=True, dense_kl={"0": 0.1}, stop_looks=3, order=("view_alignment_weight",))
    decisions = follow(config, SUBSPACE, gap(np.full(400, 3.0), **{"probe/kl_dense": 9.0}))
    stopped = [d for d in decisions if d.stop]
    assert "every actuator is at its limit" in stopped[0].stop
    assert stopped[0].settings.view_alignment_weight == pytest.approx(0.1)


def test_steps_without_a_reading_are_no_reading():
    """No-op steps have no gradient norm, steps without tokens no gap: nothing is made up for them."""
    decisions = follow(ON, SUBSPACE, [{} for _ in range(100)])
    assert first_action(decisions) is None
    assert decisions[-1].state.windows == {"rollout_corr/kl": (), "actor/grad_norm": ()}


@pytest.mark.parametrize(
    "table",
    [
        {"settled_exponent": 0.9},
        {"min_window": 200},
        {"dense_kl": {"first": 0.1}},
        {"anchor_cadence": {"limit": 0, "rate": 1}},
        {"order": ["kl_coefficient", "kl_coefficient"]},
    ],
)
def test_a_table_that_cannot_work_is_refused(table):
    with pytest.raises((UserError, ValueError), match="controller"):
        ControllerConfig(**table)
