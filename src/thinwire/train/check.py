"""`train --check`: a recipe resolved against its model without weights, and what a step of it costs."""

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.instruments.wire import WireShape, wire_bytes
from thinwire.models.layout import refuse_unsplittable
from thinwire.models.load import MetaModel, load_config_only
from thinwire.models.stages import boundaries
from thinwire.tasks.base import make_task
from thinwire.tasks.problems import read_problems
from thinwire.tasks.rewards import make_reward
from thinwire.train.anchor import is_needed, num_dense_passes
from thinwire.train.config import Recipe
from thinwire.train.memory import longest_row, memory
from thinwire.train.trackers import refuse_missing


def check(recipe: Recipe) -> dict[str, Any]:
    """Everything a recipe resolves to, its wire and its memory; UserError for what would fail later (of what
    can be known now).

    No weights, no tokenizer and (for a shipped configuration) no network are needed. Not covered: prompts
    are not measured against task.max_prompt_tokens.
    """
    refuse_missing(recipe.trackers)
    meta, origin = load_architecture(recipe)
    refuse_unsplittable(meta.model)
    config = meta.model.config.get_text_config()
    width = int(config.hidden_size)
    codec = recipe.codec.at_width(width)
    cuts = boundaries(int(config.num_hidden_layers), recipe.model.stages, recipe.model.boundaries)
    return {
        "name": recipe.name,
        "notes": notes(recipe, config),
        "model": {
            "path": recipe.model.path,
            "configuration": origin,
            "architecture": type(meta.model).__name__,
            "parameters": meta.num_parameters,
            "embedding_parameters": meta.num_embedding_parameters,
            "blocks": int(config.num_hidden_layers),
            "hidden_dim": width,
            "dtype": recipe.model.dtype,
            "stages": recipe.model.stages,
            "boundaries_after_blocks": cuts,
        },
        "task": _task(recipe),
        "trackers": list(recipe.trackers.names),
        "codec": codec.model_dump(mode="json", exclude_none=True),
        "wire": wire(recipe, codec, len(cuts)),
        "memory_bytes": memory(recipe, codec, meta, len(cuts)),
    }


def load_architecture(recipe: Recipe) -> tuple[MetaModel, str]:
    """The model on the meta device and where its configuration came from.

    A hub id whose configuration ships with the package is not asked for over the network; model.path may
    also be a folder that holds nothing but a config.json.
    """
    shipped = None if Path(recipe.model.path).is_dir() else shipped_config(recipe.model.path)
    if shipped is None:
        meta = load_config_only(recipe.model)
        return meta, meta.source
    meta = load_config_only(recipe.model.model_copy(update={"path": str(shipped)}))
    return meta, f"shipped with thinwire for {recipe.model.path}"


def shipped_config(hub_id: str) -> Path | None:
    """The package's folder with the config.json of this hub id, if it has one."""
    folder = Path(str(resources.files("thinwire").joinpath("recipes", "configs")))
    for file in sorted(folder.glob("*/config.json")):
        if json.loads(file.read_text(encoding="utf-8")).get("_name_or_path") == hub_id:
            return file.parent
    return None


def notes(recipe: Recipe, config: Any) -> list[str]:
    """What is allowed but may surprise: rows longer than the model knows, a sampler with a gap of its own."""
    found = []
    longest = recipe.task.max_prompt_tokens + recipe.sampling.max_new_tokens
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        found.append(
            f"task.max_prompt_tokens = {recipe.task.max_prompt_tokens} plus sampling.max_new_tokens = "
            f"{recipe.sampling.max_new_tokens} is more than the model's {limit} positions"
        )
    if recipe.sampling.top_p < 1 or recipe.sampling.top_k > 0:
        found.append(
            "sampling.top_p < 1 or top_k > 0 gives even the dense arm a gap: the trainer knows neither"
        )
    if recipe.sampling.min_new_tokens > 0:
        found.append(
            "sampling.min_new_tokens > 0 gives even the dense arm a gap: the trainer does not mask EOS"
        )
    return found


def _task(recipe: Recipe) -> dict[str, Any]:
    make_reward(recipe.task.reward)
    task = make_task(recipe.task, recipe.seed)
    facts: dict[str, Any] = {"name": recipe.task.name, "reward": recipe.task.reward}
    if recipe.task.problems is not None:
        facts |= {
            "problems": str(recipe.task.problems),
            "num_problems": len(read_problems(recipe.task.problems)),
        }
    return facts | {"num_validation": len(task.validation())}


def wire(recipe: Recipe, codec: Codec, num_boundaries: int) -> dict[str, float]:
    """Bits a token a boundary, and the bytes of a step at full lengths over all boundaries.

    The old, reference and training passes send every token forward, the training pass sends it back. The
    anchor sends ceil(token_share x rows) rows dense at a fire (`num_dense_passes` times).
    """
    dtype = getattr(torch, recipe.model.dtype)
    num_rows = recipe.sampling.prompts * recipe.sampling.group_size
    num_tokens = num_rows * longest_row(recipe)
    needed = is_needed(codec, recipe.anchor, num_boundaries)
    anchor_tokens = math.ceil(recipe.anchor.token_share * num_rows) * longest_row(recipe) if needed else 0
    state_bytes = codec.initial_state(0, 0).num_bytes() if num_boundaries and needed else 0
    shape = WireShape(codec.wire_bits(dtype), codec.hidden_dim, num_boundaries)
    step = wire_bytes(
        shape,
        forward_tokens=3 * num_tokens,
        backward_tokens=num_tokens,
        anchor_tokens=anchor_tokens * num_dense_passes(codec, recipe.anchor, recipe.rl.kl_coefficient),
        probe_tokens=0,
        side_channel_bytes=state_bytes * num_boundaries,
    )
    anchor, side = step["wire/anchor_bytes"], step["wire/side_channel_bytes"]
    return {
        "bits_per_token_per_boundary": shape.bits_per_token,
        "bits_per_value": step["wire/bits_per_value"],
        "share_of_dense": shape.bits_per_token / (16 * codec.hidden_dim),
        "tokens_per_step": num_tokens,
        "forward_bytes_per_step": step["wire/forward_bytes"],
        "backward_bytes_per_step": step["wire/backward_bytes"],
        "dense_bytes_per_step": step["wire/dense_bytes"],
        "anchor_bytes_per_fire": anchor,
        "anchor_bytes_per_step": anchor / recipe.anchor.cadence,
        "side_channel_bytes_per_fire": side,
        "side_channel_bytes_per_step": side / recipe.anchor.cadence,
    }


def describe(checked: dict[str, Any]) -> str:
    """The check as text for a terminal."""
    model, wired, parts, task = (checked[key] for key in ("model", "wire", "memory_bytes", "task"))
    settings = ", ".join(f"{key} {value}" for key, value in checked["codec"].items())
    after = ", ".join(map(str, model["boundaries_after_blocks"])) or "none"
    lines = [
        f"{checked['name']}: resolved, nothing was trained",
        f"model      {model['path']} ({model['architecture']}, configuration {model['configuration']})",
        f"           {model['parameters']:,} parameters ({model['embedding_parameters']:,} in embeddings), "
        f"{model['blocks']} blocks of width {model['hidden_dim']}, {model['dtype']}",
        f"stages     {model['stages']}, boundaries after blocks (0-based) {after}",
        "task       " + ", ".join(f"{key} {value}" for key, value in task.items()),
        f"codec      {settings}",
        f"wire       {wired['bits_per_token_per_boundary']} bits a token a boundary each way, "
        f"{wired['bits_per_value']:.3f} bits per value, {wired['share_of_dense']:.2%} of dense bf16",
        f"a step     at full lengths, {wired['tokens_per_step']:,} tokens, all boundaries:",
        f"           forward {human(wired['forward_bytes_per_step'])} (old, reference, training), "
        f"backward {human(wired['backward_bytes_per_step'])}; dense {human(wired['dense_bytes_per_step'])}",
        f"an anchor  {human(wired['anchor_bytes_per_fire'])} dense and "
        f"{human(wired['side_channel_bytes_per_fire'])} side channel a fire; "
        f"{human(wired['anchor_bytes_per_step'] + wired['side_channel_bytes_per_step'])} a step on average",
        f"memory     about {human(parts['peak'])} at the peak, estimated:",
    ]
    lines[1:1] = [f"note       {note}" for note in checked["notes"]]
    if checked["trackers"]:
        lines.insert(-1, f"trackers   {', '.join(checked['trackers'])}")
    shown = [(name, value) for name, value in parts.items() if name != "peak" and value]
    return "\n".join(
        [*lines, *(f"           {human(value):>10}  {name.replace('_', ' ')}" for name, value in shown)]
    )


def human(num_bytes: float) -> str:
    """Bytes in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
