"""One decision: (state, readings of a step) -> (state, settings of the next step), and why.

A split-range integral controller on the gap's slope. One number, the demand, integrates how far the slope
lies above its set point; actuators stand in a row, cheapest first, and each takes one unit of demand from
its recipe's value to its limit. What raises it, at a look (every `look_every` steps) only:
    gap, gradient norm: the lower confidence limit of the slope over the window lies above the set point.
        The level of every look is false_alarm / (looks x slope tests of the run), so that looking often
        does not add up (Bonferroni over looks);
    dense KL: probe/kl_dense above dense_kl_factor x the dense control's at that step;
    feed-forward: while the error growth exponent says that the same thing is thrown away every step, the
        demand is at least `feed_forward`, before the gap has moved.
Anti-windup: demand ends where the actuators do, and does not grow while one of them still lags behind it.
Hysteresis: demand falls only after `release_looks` looks without an alarm, the exponent has a dead band, and
after every action the windows start again, so that a transient of the action is not taken for drift.

Never read: codec-view KL or entropy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from thinwire.control.config import ControllerConfig
from thinwire.control.settings import Settings
from thinwire.instruments.trend import robust_slope

GAP, GRAD_NORM = "rollout_corr/kl", "actor/grad_norm"
KL_DENSE, EXPONENT = "probe/kl_dense", "error_growth/exponent"
TESTED = (GAP, GRAD_NORM)
MAX_STEP = 0.5
"""Largest demand one alarm adds."""
MIN_LEVEL = 0.1
"""Level a rise is measured against at least, nats or gradient norm: the gap of a dense run is 0."""


@dataclass(frozen=True)
class Plant:
    """What the controller acts on: the run's length, its recipe's settings, what its codec allows."""

    num_steps: int
    recipe: Settings
    compresses: bool = True
    learns: bool = False
    bits_per_value: float | None = None
    """The recipe's budget where it may change between steps, else None."""


@dataclass(frozen=True)
class ControlState:
    """All memory of the controller; JSON values only, kept in the checkpoint."""

    step: int = 0
    demand: float = 0.0
    windows: dict[str, tuple[float, ...]] = field(default_factory=dict)
    exponents: tuple[float, ...] = ()
    kl_dense: float | None = None
    positions: dict[str, float] = field(default_factory=dict)
    persistent: bool = False
    quiet_looks: int = 0
    full_looks: int = 0
    last_shots: dict[str, int] = field(default_factory=dict)
    """Step of the last extra anchor and of the last dense step."""


@dataclass(frozen=True)
class Decision:
    """What follows from one step's readings. `stop` is the reason of a hard stop, or empty."""

    state: ControlState
    settings: Settings
    events: tuple[dict[str, Any], ...] = ()
    stop: str = ""


def decide(
    config: ControllerConfig, plant: Plant, state: ControlState, readings: Mapping[str, float]
) -> Decision:
    """The settings of the step after `readings`, which are those of step state.step + 1."""
    state = _remember(config, state, readings)
    if state.step % config.look_every or not config.on:
        return Decision(state, _settings(config, plant, state))
    alarms = _alarms(config, plant, state)
    state, reason = _demanded(config, plant, state, alarms)
    state, events = _moved(config, plant, state, reason)
    state, shots, shot_events = _one_shots(config, plant, state, alarms)
    state, stop = _stopped(config, plant, state, alarms)
    settings = replace(_settings(config, plant, state), **shots)
    return Decision(state, settings, tuple(events + shot_events), stop)


def _remember(config: ControllerConfig, state: ControlState, readings: Mapping[str, float]) -> ControlState:
    windows = {
        key: (*state.windows.get(key, ()), *([readings[key]] if key in readings else []))[-config.window :]
        for key in TESTED
    }
    exponents = (*state.exponents, *([readings[EXPONENT]] if EXPONENT in readings else []))
    return replace(
        state,
        step=state.step + 1,
        windows=windows,
        exponents=exponents[-config.look_every :],
        kl_dense=readings.get(KL_DENSE, state.kl_dense),
    )


def _alarms(config: ControllerConfig, plant: Plant, state: ControlState) -> dict[str, tuple[float, str]]:
    """Reading -> (demand it asks for, why), for every reading above its set point by more than chance."""
    num_tests = max(1, plant.num_steps // config.look_every) * len(TESTED)
    found: dict[str, tuple[float, str]] = {}
    for key in TESTED:
        values = state.windows[key]
        if len(values) < config.min_window:
            continue
        level = max(MIN_LEVEL, abs(fmean(values[: len(values) // 4])))
        bound = config.slope_bound if key == GAP else config.grad_norm_rise * level / len(values)
        trend = robust_slope(values)
        low = trend.lower_limit(config.false_alarm / num_tests)
        if low > bound:
            rise = (trend.slope - bound) * len(values) / level
            why = f"{key} rises by {trend.slope:.4g} a step over {len(values)} steps (lower limit {low:.4g})"
            found[key] = (min(MAX_STEP, config.gain * rise), why)
    allowed = dense_kl_bound(config, state.step)
    if allowed is not None and state.kl_dense is not None and state.kl_dense > allowed:
        why = f"{KL_DENSE} {state.kl_dense:.3g} above {allowed:.3g}, {config.dense_kl_factor:g}x dense"
        found[KL_DENSE] = (0.25, why)
    return found


def dense_kl_bound(config: ControllerConfig, step: int) -> float | None:
    """dense_kl_factor x the dense control's probe/kl_dense at a step, linear between the table's steps."""
    table = sorted((int(at), value) for at, value in config.dense_kl.items())
    if not table:
        return None
    after = next((i for i, (at, _) in enumerate(table) if at >= step), len(table) - 1)
    (x0, y0), (x1, y1) = table[max(0, after - 1)], table[after]
    share = 0.0 if x1 == x0 else min(1.0, max(0.0, (step - x0) / (x1 - x0)))
    return config.dense_kl_factor * (y0 + share * (y1 - y0))


def _demanded(
    config: ControllerConfig, plant: Plant, state: ControlState, alarms: Mapping[str, tuple[float, str]]
) -> tuple[ControlState, str]:
    """The next demand, and the reason of a change."""
    exponent = fmean(state.exponents) if len(state.exponents) >= config.look_every // 2 else None
    persistent = state.persistent
    if exponent is not None:
        bound = config.settled_exponent if persistent else config.persistent_exponent
        persistent = plant.compresses and exponent > bound
    quiet = 0 if alarms else state.quiet_looks + 1
    demand, reason = state.demand, ""
    if alarms and not _lags(config, plant, state):
        demand += max(asked for asked, _ in alarms.values())
        reason = "; ".join(why for _, why in alarms.values())
    elif not alarms and quiet >= config.release_looks and demand > 0:
        demand -= config.release
        reason = f"{quiet} looks without an alarm"
    floor = config.feed_forward if persistent else 0.0
    if demand < floor and exponent is not None:
        demand = floor
        reason = f"error growth exponent {exponent:.2f} (mean of {len(state.exponents)} steps) is persistent"
    demand = min(max(demand, 0.0), float(len(_available(config, plant))))
    return replace(state, demand=demand, persistent=persistent, quiet_looks=quiet), reason


def _available(config: ControllerConfig, plant: Plant) -> list[str]:
    """The continuous actuators that are switched on and can act on this plant, in split-range order."""
    acts = {
        "view_alignment_weight": plant.compresses,
        "kl_coefficient": True,
        "learning_rate_scale": True,
        "anchor_cadence": plant.learns,
        "bits_per_value": plant.bits_per_value is not None,
    }
    return [name for name in config.order if acts[name] and getattr(config, name) is not None]


def _start(plant: Plant, name: str) -> float:
    """The recipe's own value of an actuator."""
    return (
        float(plant.bits_per_value or 0.0) if name == "bits_per_value" else float(getattr(plant.recipe, name))
    )


def _targets(config: ControllerConfig, plant: Plant, demand: float) -> dict[str, float]:
    """Where each actuator should stand: start + clip(demand - place, 0, 1) (limit - start)."""
    targets = {}
    for place, name in enumerate(_available(config, plant)):
        start, share = _start(plant, name), min(1.0, max(0.0, demand - place))
        targets[name] = start + share * (getattr(config, name).limit - start)
    return targets


def _position(plant: Plant, state: ControlState, name: str) -> float:
    return state.positions.get(name, _start(plant, name))


def _lags(config: ControllerConfig, plant: Plant, state: ControlState) -> bool:
    """Whether a rate limit still holds an actuator away from the demand."""
    targets = _targets(config, plant, state.demand)
    return any(abs(_position(plant, state, name) - target) > 1e-12 for name, target in targets.items())


def _moved(
    config: ControllerConfig, plant: Plant, state: ControlState, reason: str
) -> tuple[ControlState, list[dict[str, Any]]]:
    """Every actuator a rate-limited move nearer to its target; the windows start again if one moved."""
    positions, events = dict(state.positions), []
    for name, target in _targets(config, plant, state.demand).items():
        now, rate = _position(plant, state, name), getattr(config, name).rate
        then = now + min(rate, max(-rate, target - now))
        if then != now:
            positions[name] = then
            why = reason or f"demand {state.demand:.2f}, still on its way to {target:.4g}"
            events.append(_event(state, name, now, then, why))
    if events:
        state = replace(state, positions=positions, windows={})
    return state, events


def _one_shots(
    config: ControllerConfig, plant: Plant, state: ControlState, alarms: Mapping[str, tuple[float, str]]
) -> tuple[ControlState, dict[str, bool], list[dict[str, Any]]]:
    """An extra anchor or a dense step for the next step alone, after an alarm, no more often than allowed."""
    shots: dict[str, bool] = {}
    events: list[dict[str, Any]] = []
    possible = {
        "extra_anchor": config.extra_anchor_every if plant.learns else 0,
        "codec_off": config.codec_off_every if plant.compresses else 0,
    }
    for name, every in possible.items():
        if alarms and every and state.step - state.last_shots.get(name, -every) >= every:
            shots[name] = True
            state = replace(state, last_shots={**state.last_shots, name: state.step})
            events.append(_event(state, name, False, True, "; ".join(why for _, why in alarms.values())))
    return state, shots, events


def _stopped(
    config: ControllerConfig, plant: Plant, state: ControlState, alarms: Mapping[str, tuple[float, str]]
) -> tuple[ControlState, str]:
    """Alarms in a row at full demand, and why the run must stop now, or ""."""
    full = bool(alarms) and state.demand >= len(_available(config, plant))
    state = replace(state, full_looks=state.full_looks + 1 if full else 0)
    if not config.stop_looks or state.full_looks < config.stop_looks:
        return state, ""
    return state, "every actuator is at its limit and still " + "; ".join(why for _, why in alarms.values())


def _event(state: ControlState, actuator: str, old: Any, new: Any, reason: str) -> dict[str, Any]:
    return {
        "step": state.step,
        "event": "controller",
        "actuator": actuator,
        "from": old,
        "to": new,
        "demand": state.demand,
        "reason": reason,
    }


def _settings(config: ControllerConfig, plant: Plant, state: ControlState) -> Settings:
    """The recipe's settings with every moved actuator at its position."""
    values: dict[str, Any] = {name: state.positions[name] for name in state.positions}
    if "anchor_cadence" in values:
        values["anchor_cadence"] = max(1, round(values["anchor_cadence"]))
    return replace(plant.recipe, **values)
