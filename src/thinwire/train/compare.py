"""Arms x seeds of a recipe: a fair plan, its runs side by side, and one summary over all of them."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from thinwire.core.errors import UserError
from thinwire.train.checkpoint import list_steps
from thinwire.train.config import Recipe, arm_tables, load_recipe, read_toml, resolve
from thinwire.train.locks import is_empty, locked
from thinwire.train.places import read_status
from thinwire.train.progress import Display
from thinwire.train.summary import compare_summary
from thinwire.train.trackers import refuse_missing
from thinwire.train.workers import Plan, PlannedRun, run_all, summary_of

MAY_DIFFER = ("codec", "anchor")
"""Tables in which the arms of a fair comparison may differ."""

_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def make_plan(
    recipe: Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    vary: Sequence[str],
    out: Path,
) -> Plan:
    """Resolve every run (no arms named = all of the recipe) and refuse an unfair or unusable comparison."""
    raw = read_toml(recipe)
    known = arm_tables(raw)
    if not known:
        raise UserError(
            f"recipe {recipe} has no [arms.NAME] tables, so there is nothing to compare; add them"
        )
    arms, seeds = list(dict.fromkeys(arms or known)), list(dict.fromkeys(seeds or [raw.get("seed", 42)]))
    recipes = {arm: resolve(raw, overrides, arm) for arm in arms}
    for arm in arms:
        if not _ARM_NAME.fullmatch(arm):
            raise UserError(f"arm {arm!r} names a directory: use letters, digits, '.', '_' and '-' only")
        if "seed" in known[arm]:
            raise UserError(f"arms.{arm}.seed = {known[arm]['seed']!r} has no effect here; use --seeds")
    refuse_unfair(recipes, vary)
    overrides = _with_group(overrides, recipes.values(), out)
    runs = tuple(
        PlannedRun(arm, seed, resolve(raw, [*overrides, f"--seed={seed}"], arm), out / arm / f"seed-{seed}")
        for seed in seeds
        for arm in arms
    )
    refuse_foreign(out, runs)
    return Plan(recipes[arms[0]].name, recipe.read_bytes(), tuple(overrides), runs, out)


def _with_group(overrides: Sequence[str], recipes: Iterable[Recipe], out: Path) -> Sequence[str]:
    """Overrides that let the runs' trackers show them as one group; UserError for a tracker not installed."""
    tracked = [recipe.trackers for recipe in recipes if recipe.trackers.names]
    for config in tracked:
        refuse_missing(config)
    if not tracked or any(config.group for config in tracked):
        return overrides
    return [*overrides, f"--trackers.group={json.dumps(out.resolve().name, ensure_ascii=False)}"]


def refuse_unfair(recipes: Mapping[str, Recipe], vary: Sequence[str]) -> None:
    """Arms may differ in [codec] and [anchor] only, and in what a --vary prefix names."""
    allowed = (*MAY_DIFFER, *vary)
    (first_arm, first), *others = recipes.items()
    for arm, recipe in others:
        for key, (one, other) in differences(first, recipe).items():
            if not any(key == prefix or key.startswith(f"{prefix}.") for prefix in allowed):
                raise UserError(
                    f"arms {first_arm} and {arm} differ in {key} ({_shown(one)} and {_shown(other)}), "
                    f"not only in codec and anchor; make them equal, or allow it with --vary {key}"
                )


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted keys with unequal values, and both values (None = not set); [arms] apart, and [trackers], which
    change nothing in a run."""
    left, right = flatten(one.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
    keys = [key for key in dict.fromkeys([*left, *right]) if not key.startswith(("arms.", "trackers."))]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def refuse_foreign(out: Path, runs: Sequence[PlannedRun]) -> None:
    """--out is new or empty, or holds the same comparison: runs made with equal recipes."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a directory")
    if not out.exists() or is_empty(out):
        return
    if not (out / "recipe.toml").is_file():
        raise UserError(f"--out {out} is not empty and holds no comparison; name another directory")
    for run in runs:
        refuse_other_recipe(run.out, run.recipe)


def refuse_other_recipe(out: Path, recipe: Recipe) -> None:
    """A run directory may be taken up again only with the recipe that made it."""
    if not (out / "config.toml").is_file():
        return
    for key, (there, here) in differences(load_recipe(out / "config.toml"), recipe).items():
        raise UserError(
            f"{out} was made with {key} = {_shown(there)}, this recipe has {_shown(here)}; "
            "name another --out, or give the same recipe to go on"
        )


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def compare(
    plan: Plan,
    jobs: int,
    display: Display,
    write_report: Callable[[Path, Path], object],
    at_steps: Sequence[int] = (),
) -> dict[str, Any]:
    """Run what is not done yet, `jobs` at a time; write summary.json and report.html; return the summary.

    Done runs are skipped, interrupted and failed ones go on from their checkpoints. Ctrl-C asks every run
    to stop at its step boundary; a second one ends them at once. `at_steps`: the steps whose readings the
    summary holds, default the quarter marks.
    """
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1 process, got {jobs}")
    with locked(plan.out):
        _prepare(plan)
        with display:
            waiting = [run for run in plan.runs if read_status(run.out) != "done"]
            errors = run_all(waiting, plan, jobs, display)
        summary = compare_summary(
            plan.name, [summary_of(run, errors.get(run.label), at_steps) for run in plan.runs]
        )
        _write_json(plan.out / "summary.json", summary)
        if any((run.out / "metrics.jsonl").exists() for run in plan.runs):
            write_report(plan.out, plan.out / "report.html")
    return summary


def _prepare(plan: Plan) -> None:
    """Keep the recipe beside the runs, and clear runs that left no checkpoint to go on from.

    A run that a process still works on (a worker whose parent was killed, a --resume by hand) is refused
    before anything is changed.
    """
    begun = [run.out for run in plan.runs if read_status(run.out) != "done" and run.out.exists()]
    with ExitStack() as stack:
        for out in begun:
            stack.enter_context(locked(out))
        try:
            (plan.out / "recipe.toml").write_bytes(plan.recipe_bytes)
        except OSError as error:
            raise UserError(f"--out {plan.out} cannot be written: {error.strerror}; name another") from None
        for out in begun:
            if not list_steps(out / "checkpoints"):
                shutil.rmtree(out)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
