"""`train --check`: a recipe resolved against its model without weights, and what a step of it costs.

Letters in the formulas: P parameters, c bytes of a value in model.dtype, L blocks, D hidden size, Q and K
widths of all query heads and of all key heads, F width of the MLP, H and G numbers of query and key heads,
V vocabulary, N tokens.
"""

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.core.keys import scalar_keys
from thinwire.instruments.wire import WireShape, wire_bytes
from thinwire.models.layout import refuse_unsplittable
from thinwire.models.load import MetaModel, load_config_only
from thinwire.models.stages import boundaries
from thinwire.rl.logprobs import CHUNK_LOGIT_BYTES
from thinwire.tasks.base import make_task
from thinwire.tasks.problems import read_problems
from thinwire.tasks.rewards import make_reward
from thinwire.train.anchor import is_needed, num_dense_passes
from thinwire.train.config import Recipe, batch_rows


def check(recipe: Recipe) -> dict[str, Any]:
    """Everything a recipe resolves to, its wire and its memory; UserError for what would fail later (of what
    can be known now).

    No weights, no tokenizer and (for a shipped configuration) no network are needed. Not covered: prompts
    are not measured against task.max_prompt_tokens.
    """
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


def longest_row(recipe: Recipe) -> int:
    """Tokens of a row at full prompt and response, rounded up to the length bucket."""
    bucket = recipe.rl.length_bucket
    return -(-(recipe.task.max_prompt_tokens + recipe.sampling.max_new_tokens) // bucket) * bucket


def micro_batch_rows(recipe: Recipe) -> int:
    """Rows of one forward and backward pass."""
    return min(batch_rows(recipe)[1], recipe.sampling.prompts * recipe.sampling.group_size)


def wire(recipe: Recipe, codec: Codec, num_boundaries: int) -> dict[str, float]:
    """Bits a token a boundary, and the bytes of a step at full lengths over all boundaries.

    The old, reference and training passes send every token forward, the training pass sends it back. The
    anchor sends ceil(token_share x rows) rows dense at a fire (2 or 3 times with a merged gradient).
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
        anchor_tokens=anchor_tokens * num_dense_passes(recipe.anchor, recipe.rl.kl_coefficient),
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


def memory(recipe: Recipe, codec: Codec, meta: MetaModel, num_boundaries: int) -> dict[str, float]:
    """Bytes on the device: what stays, what each phase adds, and the highest sum.

    weights, reference, snapshot (anchor.delay > 0): c P each. masters 4 P unless c = 4. AdamW moments 8 P.
    gradients 4 P, plus c P of the compute type unless c = 4. update_copy: the clipped gradients, 4 P.
    refusal_copy: masters and moments, 12 P, where a step has several ticks. anchor_average 4 P with a
    merge. keyed draws: kept for all tokens of a step. activations: `block_activations` of a micro-batch.
    logits: four float32 chunks. kv_cache: 2 c L K bytes a token over the rows decoded at once.
    Not covered: the allocator's fragmentation, CUDA's context, and temporaries within a kernel.
    """
    size, params = getattr(torch, recipe.model.dtype).itemsize, meta.num_parameters
    half = size != 4
    sampling = recipe.sampling
    num_rows = sampling.prompts * sampling.group_size
    num_tokens = micro_batch_rows(recipe) * longest_row(recipe)
    several_ticks = 0 < recipe.rl.mini_batch_prompts < sampling.prompts
    blocks = block_activations(meta, size, num_tokens)
    staying = {
        "weights": size * params,
        "reference": size * params,
        "snapshot": size * params * (recipe.anchor.delay > 0),
        "masters": 4 * params * half,
        "adamw_moments": 8 * params,
        "refusal_copy": 12 * params * several_ticks,
        "anchor_average": 4 * params * (recipe.anchor.merge_alpha < 1.0),
        "keyed_draws": _draw_bytes(codec) * num_boundaries * num_rows * longest_row(recipe),
    }
    gradients = (4 + size * half) * params
    chunk_tokens = recipe.rl.logprob_chunk_tokens or max(1, CHUNK_LOGIT_BYTES // (4 * _vocabulary(meta)))
    logits = 4 * 4 * min(chunk_tokens, num_tokens) * _vocabulary(meta)
    decoded = min(sampling.batch_rows or num_rows, num_rows)
    kept = blocks["with_checkpointing" if recipe.model.gradient_checkpointing else "without_checkpointing"]
    phases = {
        "training_pass": gradients + kept + logits,
        "update": gradients + 4 * params,
        "sampling": decoded
        * (recipe.task.max_prompt_tokens + sampling.max_new_tokens)
        * _cache_bytes(meta, size),
    }
    parts = staying | {
        "gradients": gradients,
        "update_copy": 4 * params,
        "activations_without_checkpointing": blocks["without_checkpointing"],
        "activations_with_checkpointing": blocks["with_checkpointing"],
        "logits": logits,
        "kv_cache": phases["sampling"],
    }
    total = sum(staying.values()) + max(phases.values())
    return {**{name: float(value) for name, value in parts.items()}, "peak": float(total)}


def block_activations(meta: MetaModel, size: int, num_tokens: int) -> dict[str, int]:
    """Bytes that backward needs of N tokens, in a block of the Llama layout with fused attention.

    A block without checkpointing, per token: 2 (4 + 2c) D for the two norms (their fp32 input, its
    normalised and its weighted value; in fp32 4 = c), c (2 Q + 2 K + 4 F) for attention and the gated MLP,
    4 (H + 2) for softmax and norm statistics; a norm on queries and keys adds (4 + c)(Q + K) + 4 (H + G).
    Checkpointing keeps c D of every block and one block's whole. The codec keeps nothing.
    """
    config = meta.model.config.get_text_config()
    heads, groups, head_width = _heads(config)
    queries, keys = heads * head_width, groups * head_width
    hidden, blocks = int(config.hidden_size), int(config.num_hidden_layers)
    per_token = (
        2 * (4 + 2 * size) * hidden
        + size * (2 * queries + 2 * keys + 4 * int(config.intermediate_size))
        + 4 * (heads + 2)
    )
    if any(name.endswith("q_norm") for name, _ in meta.model.named_modules()):
        per_token += (4 + size) * (queries + keys) + 4 * (heads + groups)
    return {
        "without_checkpointing": num_tokens * blocks * per_token,
        "with_checkpointing": num_tokens * (blocks * size * hidden + per_token),
    }


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads, width of a head."""
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    return heads, groups, int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _cache_bytes(meta: MetaModel, size: int) -> int:
    config = meta.model.config.get_text_config()
    _, groups, head_width = _heads(config)
    return 2 * size * int(config.num_hidden_layers) * groups * head_width


def _vocabulary(meta: MetaModel) -> int:
    return int(meta.model.get_output_embeddings().weight.shape[0])


def _draw_bytes(codec: Codec) -> int:
    """Bytes of the keyed draw of one token at one boundary."""
    draw = codec.draw(scalar_keys(0, 1), 0)
    return 0 if draw is None else draw.numel() * draw.element_size()


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
