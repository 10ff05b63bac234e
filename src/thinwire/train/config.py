"""A recipe: one TOML file that says everything about a run, each table defined beside its owner."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError
from pydantic.fields import FieldInfo

from thinwire.codecs import CODECS, Codec, ExactK
from thinwire.control import ControllerConfig
from thinwire.core.errors import UserError
from thinwire.engines.optimizer import AdamWConfig
from thinwire.models.load import ModelConfig
from thinwire.sampling.base import SamplingConfig
from thinwire.tasks.base import TaskConfig
from thinwire.train.anchor import AnchorConfig
from thinwire.train.losses import RlConfig
from thinwire.train.probe import ProbeConfig
from thinwire.train.trackers import TrackersConfig

_CODECS: dict[str, type[Codec]] = {kind.model_fields["name"].default: kind for kind in CODECS}


def _codec(value: Any) -> Any:
    """The codec class named by the table; its own fields are validated by pydantic."""
    if isinstance(value, Codec):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"codec must be a table such as codec.name = 'exact-k', got {value!r}")
    name = value.get("name", "exact-k")
    if not isinstance(name, str) or name not in _CODECS:
        raise UserError(
            f"codec.name must be one of {', '.join(_CODECS)}, got {name!r}{_nearest(name, _CODECS)}"
        )
    if value.get("hidden_dim"):
        raise UserError(f"codec.hidden_dim is the model's width, not a setting; remove {value['hidden_dim']}")
    try:
        return _CODECS[name].model_validate(value)
    except ValidationError as error:
        raise UserError(_one_line(error, prefix=("codec",), models={"codec": _CODECS[name]})) from None


class _Table(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True
    )


class ValidationConfig(_Table):
    """Greedy scoring of the held-out problems with the dense sampler."""

    every: int = Field(20, ge=0)
    """Rollout steps between validations, besides step 0 and the last; 0 = only those two."""
    batch_rows: int = Field(0, ge=0)
    """Problems decoded at once; 0 = all."""


class CheckpointConfig(_Table):
    """Step-boundary checkpoints that a run resumes from."""

    every: int = Field(50, ge=0)
    """Rollout steps between checkpoints; 0 = only on a stop."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept on disk."""
    models: bool = True
    """Save the final and the best model (by validation) as transformers folders."""


class LoggingConfig(_Table):
    """What a run writes besides its metrics."""

    rollouts_per_step: int = Field(4, ge=0)
    """Rows of each step written to rollouts.jsonl."""
    rollouts_max_megabytes: float = Field(64.0, ge=0)
    """rollouts.jsonl stops growing at this size (10^6 bytes)."""


class Recipe(_Table):
    """Everything a run depends on, resolved."""

    name: str = "run"
    """What the run is called in reports."""
    seed: int = Field(42, ge=0, lt=1 << 32)
    """Seed of every keyed draw."""
    steps: int = Field(200, ge=1)
    """Rollout steps."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    rl: RlConfig = Field(default_factory=RlConfig)
    optimizer: AdamWConfig = Field(default_factory=AdamWConfig)
    codec: Annotated[SerializeAsAny[Codec], BeforeValidator(_codec)] = Field(default_factory=ExactK)
    anchor: AnchorConfig = Field(default_factory=AnchorConfig)
    probe: ProbeConfig = Field(default_factory=ProbeConfig)
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    trackers: TrackersConfig = Field(default_factory=TrackersConfig)
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Named overrides for `compare`, each a table like the recipe's own."""


def batch_rows(recipe: Recipe) -> tuple[int, int]:
    """Rows of a mini-batch and of a micro-batch."""
    mini_rows = (recipe.rl.mini_batch_prompts or recipe.sampling.prompts) * recipe.sampling.group_size
    return mini_rows, recipe.rl.micro_batch_rows or mini_rows


def load_recipe(path: Path, overrides: Sequence[str] = (), arm: str | None = None) -> Recipe:
    """The recipe in a TOML file, with an arm's table and then command-line overrides laid over it."""
    return resolve(read_toml(path), overrides, arm)


def read_toml(path: Path) -> dict[str, Any]:
    """The raw tables of a recipe file; relative problem paths are left to the working directory."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"recipe {path} does not exist; recipes/ holds examples") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise UserError(f"recipe {path} is not a TOML file: {error}") from None
    except RecursionError:
        raise UserError(
            f"recipe {path} nests its values too deep to read; a recipe has tables of keys"
        ) from None


def resolve(raw: Mapping[str, Any], overrides: Sequence[str] = (), arm: str | None = None) -> Recipe:
    """Validate raw tables into a Recipe; the first mistake becomes one UserError line."""
    tables = dict(raw)
    if arm is not None:
        tables = lay_over(tables, _arm_table(tables, arm))
    tables = lay_over(tables, parse_overrides(overrides))
    try:
        _refuse_booleans(tables, Recipe)
        return Recipe.model_validate(tables)
    except ValidationError as error:
        raise UserError(_of_arm(arm, _one_line(error))) from None
    except UserError as error:
        raise UserError(_of_arm(arm, str(error))) from None


def _of_arm(arm: str | None, mistake: str) -> str:
    return f"arm {arm}: {mistake}" if arm else mistake


def arm_tables(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe's [arms.NAME] tables; UserError where `arms` is something else."""
    arms = raw.get("arms", {})
    if not isinstance(arms, Mapping):
        raise UserError(f"arms must be tables such as [arms.dense], got {arms!r}")
    return arms


def _arm_table(raw: Mapping[str, Any], arm: str) -> Mapping[str, Any]:
    arms = arm_tables(raw)
    if arm not in arms:
        has = f"it has {', '.join(arms)}" if arms else "it has none"
        raise UserError(f"arm {arm!r} is not in [arms] of the recipe{_nearest(arm, arms)}; {has}")
    table = arms[arm]
    if not isinstance(table, Mapping):
        raise UserError(f"arms.{arm} must be a table of settings, got {table!r}")
    return table


def _refuse_booleans(tables: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    """`true` for a number would be read as 1."""
    for key, value in tables.items():
        field = model.model_fields.get(key)
        if field is None:
            continue
        if isinstance(value, Mapping):
            inner = _CODECS.get(str(value.get("name", "exact-k"))) if key == "codec" else _model_of(field)
            if inner is not None:
                _refuse_booleans(value, inner, f"{prefix}{key}.")
        elif isinstance(value, bool) and field.annotation is not bool:
            raise UserError(f"{prefix}{key} = {str(value).lower()} is not valid: it is no on/off setting")


def lay_over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`, table by table.

    A [codec] with another name replaces the whole table, and another model.stages drops the boundaries
    that belong to the old number.
    """
    merged = dict(base)
    if top.get("stages", base.get("stages")) != base.get("stages") and "boundaries" not in top:
        merged.pop("boundaries", None)
    for key, value in top.items():
        old = merged.get(key)
        if not (isinstance(value, Mapping) and isinstance(old, Mapping)):
            merged[key] = value
        elif key == "codec" and value.get("name", old.get("name")) != old.get("name"):
            merged[key] = dict(value)
        else:
            merged[key] = lay_over(old, value)
    return merged


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`--a.b value` or `--a.b=value` pairs as nested tables; values are TOML, or else plain text."""
    tables: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise UserError(f"unexpected argument {flag!r}; settings are given as --table.key value")
        key, equals, text = flag[2:].partition("=")
        if not equals:
            if not remaining:
                raise UserError(f"--{key} needs a value")
            text = remaining.pop(0)
        table = tables
        *parents, leaf = key.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise UserError(f"--{key}: {parent} was given as a value before, so it has no {leaf}")
        table[leaf] = _toml_value(text)
    return tables


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def dump_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML that `load_recipe` reads back to an equal one."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def _nearest(name: Any, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _one_line(
    error: ValidationError, prefix: tuple[str, ...] = (), models: Mapping[str, type[BaseModel]] | None = None
) -> str:
    """The first mistake: the field as typed, what is wrong, the value got, and the nearest known key."""
    first = error.errors()[0]
    path = (*prefix, *(str(part) for part in first["loc"]))
    field = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _known_keys(path[:-1], models or {})
        suggestion = _elsewhere(path[-1], 1.0) or _nearest(path[-1], known) or _elsewhere(path[-1], 0.7)
        suggestion = suggestion or f"; known keys: {', '.join(known)}"
        return f"unknown key {field} = {first['input']!r}{suggestion}"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    if first["type"] == "bool_parsing":
        return f"{field} = {first['input']!r} is not valid: it is true or false"
    if isinstance(first["input"], Mapping) and cause is not None:  # a rule over several keys of a table
        return str(cause)
    return f"{field} = {first['input']!r} is not valid: {cause or first['msg']}"


def _known_keys(path: Sequence[str], models: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    model: type[BaseModel] = Recipe
    for part in path:
        if part in models:
            model = models[part]
            continue
        inner = _model_of(model.model_fields[part]) if part in model.model_fields else None
        if inner is None:
            return {}
        model = inner
    return dict(model.model_fields)


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _elsewhere(name: str, cutoff: float) -> str:
    """A hint at the table that has a key of this name, or about it (cutoff < 1)."""
    tables = {key: _model_of(field) for key, field in Recipe.model_fields.items() if key != "codec"}
    keys = [(inner, key) for key, model in tables.items() if model for inner in model.model_fields]
    keys += [(inner, "codec") for kind in CODECS for inner in kind.model_fields if inner != "hidden_dim"]
    close = difflib.get_close_matches(name, [inner for inner, _ in keys], n=1, cutoff=cutoff)
    return f"; did you mean {dict(keys)[close[0]]}.{close[0]!s}?" if close else ""
