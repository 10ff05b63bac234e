"""A recipe: one TOML file that says everything about a run, each table defined beside its owner."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError

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
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"recipe {path} does not exist; recipes/ holds examples") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise UserError(f"recipe {path} is not a TOML file: {error}") from None


def resolve(raw: Mapping[str, Any], overrides: Sequence[str] = (), arm: str | None = None) -> Recipe:
    """Validate raw tables into a Recipe; the first mistake becomes one UserError line."""
    tables = dict(raw)
    if arm is not None:
        arms = tables.get("arms", {})
        if not isinstance(arms, Mapping) or arm not in arms:
            raise UserError(
                f"arm {arm!r} is not in [arms] of the recipe{_nearest(arm, arms)}; it has {', '.join(arms)}"
            )
        if not isinstance(arms[arm], Mapping):
            raise UserError(f"arms.{arm} must be a table of settings, got {arms[arm]!r}")
        tables = lay_over(tables, arms[arm])
    tables = lay_over(tables, parse_overrides(overrides))
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        raise UserError(_one_line(error)) from None


def lay_over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`, table by table; a [codec] with another name replaces the whole table."""
    merged = dict(base)
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
    except tomllib.TOMLDecodeError:
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
        suggestion = _nearest(path[-1], known) or f"; known keys: {', '.join(known)}"
        return f"unknown key {field} = {first['input']!r}{suggestion}"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    return f"{field} = {first['input']!r} is not valid: {first['msg']}"


def _known_keys(path: Sequence[str], models: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    model: type[BaseModel] = Recipe
    for part in path:
        if part in models:
            model = models[part]
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return {}
        model = annotation
    return dict(model.model_fields)
