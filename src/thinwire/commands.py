"""What each subcommand of `thinwire` does: parsed options in, a Result out.

Imports that load torch stand inside the functions, so that --help and usage errors answer at once.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.errors import UserError
from thinwire.train.places import (
    did_you_mean,
    find_recipe,
    latest_run,
    new_out,
    read_object,
    recorded_arm,
    refuse_used,
)

if TYPE_CHECKING:
    from thinwire.train.config import Recipe

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
EXIT_OF_STATUS = {"done": DONE, "failed": FAILED, "interrupted": INTERRUPTED}
QUICK = ("--steps=40", "--sampling.prompts=16", "--rl.mini_batch_prompts=8")
"""demo --quick: a fifth of the steps and half of the prompts."""


@dataclass(frozen=True)
class Result:
    """What a command leaves: its JSON object, the same as text, and the exit status."""

    value: dict[str, Any]
    text: str
    exit_status: int = DONE


def train(options: argparse.Namespace) -> Result:
    """One run of a recipe, or --check, or --resume."""
    if options.resume is not None:
        return resume(options)
    if options.recipe is None:
        raise UserError("train needs a RECIPE (a TOML file or a name such as demo), or --resume DIR")
    recipe = _load(options)
    if options.check:
        from thinwire.train.check import check, describe

        checked = check(recipe)
        return Result(checked, describe(checked))
    out = options.out or new_out("-".join(part for part in (recipe.name, options.arm) if part))
    refuse_used(out)
    return _run(recipe, out, options.arm, resume=False)


def resume(options: argparse.Namespace) -> Result:
    """Go on exactly as the run was started; whatever would change it is refused."""
    from thinwire.train.compare import refuse_other_recipe
    from thinwire.train.config import load_recipe

    for name, value in (("--out", options.out), ("--check", options.check)):
        if value:
            raise UserError(
                f"{name} has no effect with --resume, which names the run's directory; leave it away"
            )
    out = latest_run() if options.resume == "latest" else Path(options.resume)
    config = out / "config.toml"
    if not config.is_file():
        raise UserError(f"--resume {out} holds no run (no config.toml); give the --out of an interrupted run")
    arm = recorded_arm(out)
    if options.arm not in (None, arm):
        raise UserError(f"--arm {options.arm} differs from the run's arm {arm}; leave --arm away")
    refuse_unknown_options(options)
    if options.recipe is not None:
        given = load_recipe(find_recipe(options.recipe), options.settings, arm)
    else:
        given = load_recipe(config, options.settings)
    refuse_other_recipe(out, given)
    recipe = load_recipe(config).model_copy(update={"trackers": given.trackers})
    summary = read_object(out / "summary.json")
    if summary.get("status") == "done":
        page = out / "report.html"
        return Result(summary | _paths(out, page), f"{out}: done already, nothing is left to resume")
    return _run(recipe, out, arm, resume=True)


def _run(recipe: "Recipe", out: Path, arm: str | None, *, resume: bool) -> Result:
    from thinwire.reports.page import write_report
    from thinwire.train import loop
    from thinwire.train.progress import finish_text, make_display

    with make_display() as display:
        summary = loop.train(recipe, out, arm=arm, resume=resume, observer=display.observer())
    page = write_report(out, out / "report.html")
    text = f"{out}: {finish_text(summary)}\nreport: {page}"
    if summary["status"] == "interrupted":
        text += f"\ngo on with: thinwire train --resume {out}"
    return Result(summary | _paths(out, page), text, EXIT_OF_STATUS[summary["status"]])


def compare(options: argparse.Namespace) -> Result:
    """Arms x seeds of a recipe."""
    recipe = find_recipe(options.recipe)
    out = options.out or new_out(f"{recipe.stem}-compare")
    return _compare(
        options, recipe, options.arms, options.seeds, options.settings, options.vary, out, options.at
    )


def demo(options: argparse.Namespace) -> Result:
    """The package's demo recipe, all its arms."""
    settings = list(options.settings)
    if options.quick:
        settings = [*QUICK, *settings]
    seeds = [] if options.seed is None else [options.seed]
    out = options.out or new_out("demo")
    return _compare(options, find_recipe("demo"), [], seeds, settings, [], out)


def _compare(
    options: argparse.Namespace,
    recipe: Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    settings: Sequence[str],
    vary: Sequence[str],
    out: Path,
    at_steps: Sequence[int] = (),
) -> Result:
    from thinwire.reports.page import write_report
    from thinwire.train import compare as comparison
    from thinwire.train.progress import make_display

    refuse_unknown_options(options)
    plan = comparison.make_plan(recipe, arms, seeds, settings, vary, out)
    summary = comparison.compare(plan, options.jobs, make_display(), write_report, at_steps)
    page = out / "report.html"
    return Result(
        summary | _paths(out, page), _comparison_text(summary, page), EXIT_OF_STATUS[summary["status"]]
    )


def _comparison_text(summary: dict[str, Any], page: Path) -> str:
    """The step table, what failed, and where the page is."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from thinwire.train.summary import step_table

    header, *rows = step_table(summary)
    table = Table(*header, box=box.SIMPLE, title=f"{summary['name']}: last step, means over seeds")
    for row in rows:
        table.add_row(*row)
    buffer = StringIO()
    Console(file=buffer, width=200, no_color=True).print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    for arm, entry in summary["arms"].items():
        for seed, run in entry["seeds"].items():
            if run["status"] != "done":
                lines.append(
                    f"{arm} seed {seed}: {run['status']} at step {run['steps']} {run.get('error', '')}"
                )
    if summary["status"] != "done":
        lines.append(f"the same command with --out {page.parent} goes on")
    if page.exists():
        lines.append(f"report: {page}")
    return "\n".join(lines)


def report(options: argparse.Namespace) -> Result:
    """One HTML page of a run or comparison directory."""
    from thinwire.reports.page import write_report

    page = write_report(options.directories, options.out)
    return Result({"report": str(page)}, f"report: {page}")


def watch(options: argparse.Namespace) -> Result:
    """The live view on a terminal until Ctrl-C; one frame anywhere else, with --once or with --json."""
    from thinwire.reports import watch as live

    live.refuse_interval(options.every)
    watched = live.Watch(options.directory)
    stream = options.stdout
    if not (options.once or options.json) and live.is_screen(stream):
        live.watch(watched, stream, options.every)
        return Result({}, "")
    watched.look()
    return Result(watched.as_object(), "" if options.json else watched.as_text(stream))


def movement(options: argparse.Namespace) -> Result:
    """How far the weights of checkpoints have moved from a base, block by block."""
    from thinwire.train.moved_files import compare_files, describe

    found = compare_files(options.base, options.checkpoints)
    return Result(found, describe(found))


def analyze(options: argparse.Namespace) -> Result:
    """Statistics and verdict of logs, whoever wrote them."""
    from shutil import get_terminal_size

    from thinwire.reports import analyze as analysis
    from thinwire.reports.analyze_text import describe

    request = analysis.Request(tuple(options.series), options.window, options.bound, options.slope)
    found = analysis.analyze(options.logs, request)
    return Result(found, describe(found, get_terminal_size((120, 24)).columns))


def codecs(options: argparse.Namespace) -> Result:
    """Name, formula, bias, wire cost and settings of every codec at a width."""
    import torch

    from thinwire.codecs import CODECS

    if options.width < 1:
        raise UserError(f"--width must be at least 1 channel, got {options.width}")
    listed = []
    for kind in CODECS:
        bound = kind.model_validate({"name": kind.model_fields["name"].default}).at_width(options.width)
        fields = {
            name: info for name, info in kind.model_fields.items() if name not in ("name", "hidden_dim")
        }
        listed.append(
            {
                "name": bound.name,
                "about": (kind.__doc__ or "").strip().splitlines()[0],
                "settings": {name: info.description for name, info in fields.items()},
                "defaults": {name: getattr(bound, name) for name in fields},
                "unbiased": sorted(bound.unbiased),
                "learns": bound.learns,
                "bits_per_token": bound.wire_bits(torch.bfloat16),
                "bits_per_value": bound.wire_bits_per_value(torch.bfloat16),
            }
        )
    return Result({"width": options.width, "codecs": listed}, _codecs_text(options.width, listed))


def _codecs_text(width: int, listed: Sequence[dict[str, Any]]) -> str:
    lines = [f"bits a token a boundary, each way, at width {width} in bf16, default settings"]
    for codec in listed:
        bias = "unbiased" if len(codec["unbiased"]) == 2 else " ".join(["biased", *codec["unbiased"]])
        lines.append(
            f"{codec['name']}: {codec['bits_per_token']} bits, {codec['bits_per_value']:.3f} per value, "
            f"{bias}{', learned by the anchor' if codec['learns'] else ''}. {codec['about']}"
        )
        for name, about in codec["settings"].items():
            value = codec["defaults"][name]
            shown = str(value).lower() if isinstance(value, bool) else value
            given = "" if value is None else f" = {shown}"
            lines.append(f"    codec.{name}{given}: {' '.join(str(about).split())}")
    return "\n".join(lines)


def refuse_unknown_options(options: argparse.Namespace) -> None:
    """A misspelt option would otherwise be called an unknown recipe key."""
    from thinwire.train.config import Recipe

    for setting in options.settings:
        flag = setting.partition("=")[0]
        keys = [f"--{key}" for key in Recipe.model_fields]
        hint = did_you_mean(flag, [*keys, *options.known_options])
        if flag not in keys and any(hint.endswith(f" {option}?") for option in options.known_options):
            raise UserError(f"unknown option {flag}{hint}")


def _load(options: argparse.Namespace) -> "Recipe":
    from thinwire.train.config import load_recipe

    path = find_recipe(options.recipe)
    refuse_unknown_options(options)
    return load_recipe(path, options.settings, options.arm)


def _paths(out: Path, page: Path) -> dict[str, str | None]:
    return {"out": str(out), "report": str(page) if page.exists() else None}
