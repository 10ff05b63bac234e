"""How a run begins: fresh, or taken up at its newest whole checkpoint."""

import json
from pathlib import Path
from typing import Any

from thinwire.core.errors import UserError
from thinwire.instruments.error_growth import ErrorGrowth
from thinwire.models.load import LoadedModel
from thinwire.train import checkpoint
from thinwire.train.anchor import initial_anchor_state
from thinwire.train.failures import cleared_on_failure
from thinwire.train.parts import model_facts
from thinwire.train.rundir import RunDir, commit, environment, recipe_sha256
from thinwire.train.step import Parts


def fresh(run: RunDir, parts: Parts, loaded: LoadedModel, arm: str | None) -> checkpoint.Tree:
    """A new run directory, and where a run stands before its first step."""
    facts = environment(parts.recipe, arm, str(parts.engine.device))
    with cleared_on_failure(run.path):
        run.create(parts.recipe, facts, model_facts(parts, loaded))
    return _beginning(parts)


def taken_up(run: RunDir, parts: Parts, loaded: LoadedModel) -> tuple[checkpoint.Tree, list[str]]:
    """The newest whole checkpoint loaded, later lines cut, and a line on each damaged one.

    A run stopped before its first checkpoint starts over. UserError where the recipe or the weights are not
    those of the run, no checkpoint is whole, or the whole one does not fit.
    """
    recorded = _recorded(run)
    _refuse_edited_recipe(run, recorded.get("recipe_sha256"))
    _refuse_other_weights(run, recorded, loaded)
    tree = beginning = _beginning(parts)
    folder, loaded_tree, damaged = _newest_whole(run)
    if loaded_tree is not None:
        tree = loaded_tree
        try:
            checkpoint.refuse_other_states(beginning.anchor.states, tree.anchor.states)
            parts.engine.load_state(tree.engine)
        except (KeyError, ValueError) as error:
            raise UserError(f"--resume: {folder} does not fit this run's model and codec ({error})") from None
    for left in damaged:  # `save` keeps the newest ones and would take it for one of them
        left.rename(left.with_name(f"{left.name}.damaged"))
    at, unlogged = tree.progress.step, tree.progress.unlogged
    run.cut_after(at if at else -1)
    if unlogged:  # the loop writes its lines
        run.cut_after(at - 1, [run.metrics, run.movement])
    names = [left.name for left in damaged]
    event = {"step": at, "event": "resumed", "commit": commit()}
    run.append(run.events, event | ({"damaged": names} if names else {}))
    return tree, [f"{name} is damaged and was set aside; going on from step {at}" for name in names]


def _beginning(parts: Parts) -> checkpoint.Tree:
    """Where a run stands before its first step."""
    initial = initial_anchor_state(parts.codec, parts.engine.num_boundaries, parts.recipe.seed)
    errors = ErrorGrowth.at_start(parts.engine.num_boundaries, parts.engine.hidden_dim)
    return checkpoint.Tree({}, initial, checkpoint.Progress(), errors)


def _newest_whole(run: RunDir) -> tuple[Path | None, checkpoint.Tree | None, list[Path]]:
    """The newest checkpoint that can be read, and the newer ones that cannot; UserError if none can."""
    damaged: list[Path] = []
    first: checkpoint.Damaged | None = None
    for step in reversed(checkpoint.list_steps(run.checkpoints)):
        folder = run.checkpoints / f"step-{step}"
        try:
            return folder, checkpoint.load(folder), damaged
        except checkpoint.Damaged as error:
            first = first or error
            damaged.append(folder)
    if first is not None:
        raise first
    return None, None, []


def _recorded(run: RunDir) -> dict[str, Any]:
    """environment.json, which names the model's weights."""
    try:
        recorded = json.loads((run.path / "environment.json").read_text(encoding="utf-8"))
        if isinstance(recorded["model"]["fingerprint"], str):
            return dict(recorded)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"--resume: {run.path}/environment.json does not name the model's weights")


def _refuse_edited_recipe(run: RunDir, known: str | None) -> None:
    """One run is one recipe: an edit would leave a break in its series that no reader can see."""
    config = run.path / "config.toml"
    if known is not None and recipe_sha256(config.read_bytes()) != known:
        raise UserError(
            f"--resume: {config} was edited after the run began; undo that, or start a new run with it: "
            f"thinwire train {config} --out DIR"
        )


def _refuse_other_weights(run: RunDir, recorded: dict[str, Any], loaded: LoadedModel) -> None:
    """The reference policy is the model the run started from: another one would change its KL unseen."""
    known = recorded["model"]["fingerprint"]
    if known != loaded.fingerprint:
        raise UserError(
            f"--resume: model.path now holds other weights ({loaded.fingerprint[:20]}) than the run started "
            f"from ({known[:20]}); give it back the old ones"
        )
