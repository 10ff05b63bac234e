"""Options that `thinwire codecs bench` and `growth` share: which model, tokens and codecs."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.core.errors import UserError
from thinwire.train.places import did_you_mean, find_recipe, refuse_used

if TYPE_CHECKING:
    from thinwire.train.config import Recipe

SAMPLED = {"problems": "demo", "rollouts": 128, "max_new_tokens": 64, "statistics_share": 0.5}
"""Options that say how rollouts are sampled, and their defaults: without effect with --load."""
GROWTH_SAMPLED = {"rollouts": 512, "statistics_share": 0.75}
"""Other defaults of growth, which needs many sets of rollouts to learn from."""
OWN_OPTIONS = {
    "model.path": "--model",
    "model.stages": "--stages",
    "task.problems": "--problems",
    "sampling.prompts": "--rollouts",
    "sampling.max_new_tokens": "--max-new-tokens",
    "sampling.group_size": "--rollouts, one response a prompt",
}
"""Settings that an option of these commands makes."""


class Command(Protocol):
    """What `declare` needs of a command's parser."""

    def option(self, *names: str, **details: Any) -> None: ...


def shared_options(command: Command, sampled: Mapping[str, Any]) -> None:
    """Add them; `sampled` holds the command's defaults of how rollouts are sampled."""
    command.option("--model", default="embedded", help="embedded, a folder, hub id, .gguf or package:NAME")
    command.option("--stages", type=int, default=8, help="pipeline stages, one boundary less (default 8)")
    command.option("--problems", metavar="FILE|RECIPE", help="JSONL, or whose [task] to take (default demo)")
    command.option("--bits-per-value", type=float, metavar="X", help="wire budget (default each codec's own)")
    command.option(
        "--codec", action="append", default=[], metavar="NAME[:KEY=VALUE,...]", help="repeatable; default all"
    )
    command.option(
        "--rollouts", type=int, metavar="N", help=f"responses, one a prompt (default {sampled['rollouts']})"
    )
    command.option("--max-new-tokens", type=int, metavar="M", help="tokens a response at most (default 64)")
    command.option(
        "--statistics-share",
        type=float,
        metavar="X",
        help=f"of the prompts (default {sampled['statistics_share']})",
    )
    command.option("--save", type=Path, metavar="FILE", help="keep rollouts and statistics (.safetensors)")
    command.option("--load", type=Path, metavar="FILE", help="take them from such a file")
    command.option("--seed", type=int, default=42, help="of sampling, draws and intervals (default 42)")
    command.option("--out", type=Path, metavar="DIR", help="write the JSON and an HTML page there")


def checked(options: argparse.Namespace) -> "Recipe":
    """The model, task and sampling asked for; whatever can be refused without a model is refused here."""
    from thinwire.bench.store import refuse_target
    from thinwire.codec_specs import parse_spec

    refuse_below_one(options, "rollouts", "max_new_tokens")
    recipe = _recipe(options)
    for spec in options.codec:
        parse_spec(spec)
    if options.statistics_share is not None and not 0 < options.statistics_share < 1:
        raise UserError(f"--statistics-share must lie between 0 and 1, got {options.statistics_share:g}")
    if options.stages < 2:
        raise UserError(f"--stages must be 2 or more (one stage has no boundary), got {options.stages}")
    if options.load is not None and not options.load.is_file():
        raise UserError(f"--load {options.load} is not a file; name one that --save has written")
    if options.out is not None:
        refuse_used(options.out)
    if options.save is not None:
        refuse_target(options.save)
    return recipe


def _recipe(options: argparse.Namespace) -> "Recipe":
    from thinwire.train.config import resolve

    settings = [setting.partition("=")[0].removeprefix("--") for setting in options.settings]
    if options.load is not None:
        given = [name for name in (*SAMPLED, "save") if getattr(options, name) is not None]
        given += [name for name in settings if not name.startswith("model.")]
        if given:
            flag = given[0].replace("_", "-") if given[0] in SAMPLED else given[0]
            raise UserError(f"--{flag} has no effect with --load, which holds the rollouts; leave it away")
    for name in settings:
        if name in OWN_OPTIONS:
            raise UserError(f"--{name} is set by {OWN_OPTIONS[name]}")
        if name.partition(".")[0] not in ("model", "task", "sampling"):
            hint = did_you_mean(f"--{name}", options.known_options)
            raise UserError(
                f"--{name} has no effect here{hint or '; settings of model, task, sampling have'}"
            )
    sampling = {
        "prompts": sampled(options, "rollouts"),
        "max_new_tokens": sampled(options, "max_new_tokens"),
        "group_size": 1,
    }
    tables = {
        "model": {"path": options.model, "stages": options.stages},
        "task": _task(str(sampled(options, "problems"))),
        "sampling": sampling,
        "seed": options.seed,
    }
    recipe = resolve(tables, options.settings)
    if recipe.sampling.temperature == 0:
        raise UserError("sampling.temperature must be > 0 (a greedy sampler has no gap to measure), got 0.0")
    return recipe


def sampled(options: argparse.Namespace, name: str) -> Any:
    """The option's value, or else the command's default."""
    value = getattr(options, name)
    defaults = SAMPLED | GROWTH_SAMPLED if options.action == "growth" else SAMPLED
    return defaults[name] if value is None else value


def _task(problems: str) -> dict[str, Any]:
    """The [task] table of a recipe, or that of a file of problems, none of them held out."""
    from thinwire.train.config import read_toml

    if problems.endswith((".jsonl", ".json")):
        return {"name": "problems", "problems": problems, "num_validation": 0}
    return dict(read_toml(find_recipe(problems)).get("task", {}))


def refuse_below_one(options: argparse.Namespace, *names: str) -> None:
    """UserError for an option that is given and below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
