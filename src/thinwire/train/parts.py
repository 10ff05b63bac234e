"""The parts of a run out of its recipe, what is recorded of them, and the models a run leaves.

One place where configuration becomes objects; the loop only runs them.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.core.errors import UserError
from thinwire.engines.batch import partition
from thinwire.engines.local import LocalEngine, PassConfig
from thinwire.models.load import LoadedModel, quiet_transformers
from thinwire.sampling.hf import HFSampler
from thinwire.tasks.base import make_task
from thinwire.tasks.rewards import make_reward
from thinwire.train.anchor import is_needed
from thinwire.train.checkpoint import as_os_errors
from thinwire.train.config import Recipe, batch_rows
from thinwire.train.probe import Held
from thinwire.train.rollout import Workload, roll_out, score, to_rows
from thinwire.train.step import Parts


def build(recipe: Recipe, loaded: LoadedModel) -> Parts:
    """The parts of a run out of its recipe; settings that do not fit the model are refused here."""
    if recipe.sampling.temperature == 0:
        raise UserError("sampling.temperature must be > 0 to train (greedy groups are all equal), got 0.0")
    passes = PassConfig(recipe.sampling.temperature, recipe.rl.logprob_chunk_tokens)
    if recipe.model.gradient_checkpointing:
        loaded.model.train()  # transformers recomputes blocks in training mode only; there is no dropout
    codec = recipe.codec.at_width(int(loaded.model.config.hidden_size))
    engine = LocalEngine(
        loaded.model,
        recipe.model.stages,
        recipe.model.boundaries,
        recipe.optimizer,
        passes,
        has_snapshot=recipe.anchor.delay > 0 and is_needed(codec, recipe.anchor, recipe.model.stages - 1),
    )
    sampler = HFSampler(loaded.model, loaded.eos_ids, loaded.pad_id)
    task = make_task(recipe.task, recipe.seed, loaded.tokenizer)
    work = Workload(task, recipe.task, make_reward(recipe.task.reward), loaded.tokenizer)
    held = hold(engine, sampler, work, recipe)
    return Parts(recipe, codec, engine, sampler, work, held)


def hold(engine: LocalEngine, sampler: HFSampler, work: Workload, recipe: Recipe) -> Held | None:
    """The probe's fixed batch, if it is on. Sampled while the engine still holds the initial weights, with
    the keys of step 0, which no training step uses: a resumed run draws the same tokens again."""
    problems = work.task.validation()[: recipe.probe.held_prompts] if recipe.probe.every else []
    if not problems:
        return None
    single = recipe.sampling.model_copy(update={"group_size": 1})
    sampler.push(0, engine.gather_weights())
    rollouts = roll_out(work, sampler, problems, single, recipe.seed, step=0)
    rows = to_rows(score(work, problems, rollouts, 1), standardise=False)
    (tick,) = partition(rows, len(problems), batch_rows(recipe)[1], recipe.rl.length_bucket, engine.device)
    return Held(problems, tick)


def model_facts(parts: Parts, loaded: LoadedModel) -> dict[str, Any]:
    """What environment.json says of the model: source, weights, width, where it is cut, bits a token."""
    return {
        "source": loaded.source,
        "fingerprint": loaded.fingerprint,
        "num_parameters": sum(p.numel() for p in loaded.model.parameters()),
        "hidden_size": parts.engine.hidden_dim,
        "boundaries": list(parts.engine.boundaries),
        "num_dropped_problems": parts.work.task.num_dropped,
        "wire_bits_per_token": parts.codec.wire_bits(parts.engine.dtype),
    }


def dropped_note(parts: Parts) -> list[str]:
    """A line on the problems left out because their prompts are too long, if there are any."""
    num = parts.work.task.num_dropped
    limit = parts.recipe.task.max_prompt_tokens
    return [f"{num} problems left out: prompts over task.max_prompt_tokens = {limit}"] if num else []


def backup(parts: Parts) -> Mapping[str, Tensor] | None:
    """A copy of the engine's state, only where a later tick of a step may be refused after an earlier one
    or the anchor's merge was applied; else the refused step has changed nothing."""
    mini = parts.recipe.rl.mini_batch_prompts
    one_tick = mini == 0 or mini >= parts.recipe.sampling.prompts
    if one_tick and parts.recipe.anchor.merge_alpha == 1.0:
        return None
    return {name: tensor.clone() for name, tensor in parts.engine.state().items()}


def num_updates(parts: Parts) -> float:
    """Updates of the weights so far, as AdamW counts them (its fused kernel bumps no version of a tensor)."""
    state = parts.engine.state().items()
    return next((float(count) for name, count in state if name.startswith("adamw.step.")), 0.0)


def save_model(loaded: LoadedModel, folder: Path) -> None:
    """Write model and tokenizer as a plain transformers folder, complete or not at all."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with as_os_errors(), quiet_transformers():
        loaded.model.save_pretrained(temporary)
    loaded.tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
