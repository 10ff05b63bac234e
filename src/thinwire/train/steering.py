"""Between two steps: the controller reads the step's series and gives the settings of the next one."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from thinwire.codecs import Identity
from thinwire.control import ControlState, Decision, Plant, Settings, decide
from thinwire.core.errors import UserError
from thinwire.train.anchor import is_needed
from thinwire.train.checkpoint import Progress
from thinwire.train.losses import initial_settings
from thinwire.train.step import Parts


def plant(parts: Parts) -> Plant:
    """What the controller of these parts may act on."""
    recipe, codec, engine = parts.recipe, parts.codec, parts.engine
    sends = engine.num_boundaries > 0 and not isinstance(codec, Identity)
    bits = codec.wire_bits_per_value(engine.dtype) if sends and codec.can_change_bits else None
    learns = codec.learns and is_needed(codec, recipe.anchor, engine.num_boundaries)
    return Plant(recipe.steps, initial_settings(recipe.rl, recipe.anchor.cadence), sends, learns, bits)


def settings_of(parts: Parts, progress: Progress) -> Settings:
    """The settings of the step after `progress`; UserError where a checkpoint holds unknown ones."""
    try:
        return replace(initial_settings(parts.recipe.rl, parts.recipe.anchor.cadence), **progress.settings)
    except TypeError as error:
        raise UserError(f"--resume: the checkpoint's settings are not known here ({error})") from None


def steer(parts: Parts, progress: Progress, metrics: Mapping[str, float]) -> tuple[Progress, Decision | None]:
    """Progress that remembers the decision on the step of `metrics`, and the decision itself (None: off)."""
    if not parts.recipe.controller.on:
        return progress, None
    memory = {**progress.control}
    for name in ("windows", "exponents"):
        memory[name] = _tuples(memory.get(name, {} if name == "windows" else ()))
    own = plant(parts)
    decision = decide(parts.recipe.controller, own, ControlState(**memory), metrics)
    changed = {
        field.name: getattr(decision.settings, field.name)
        for field in fields(Settings)
        if getattr(decision.settings, field.name) != getattr(own.recipe, field.name)
    }
    return replace(progress, settings=changed, control=asdict(decision.state)), decision


def _tuples(value: Any) -> Any:
    """JSON lists back as the tuples they were."""
    return {k: tuple(v) for k, v in value.items()} if isinstance(value, dict) else tuple(value)


def control_series(parts: Parts, progress: Progress, settings: Settings) -> dict[str, float]:
    """controller/*: the demand and the settings that the step at hand runs with; empty when it is off."""
    if not parts.recipe.controller.on:
        return {}
    values = {f"controller/{name}": value for name, value in asdict(settings).items() if value is not None}
    demand = {"controller/demand": float(progress.control.get("demand", 0.0))}
    return demand | {name: float(value) for name, value in values.items()}
