"""Bytes on the device that a step of a recipe needs, estimated from shapes alone.

Letters in the formulas: P parameters, c bytes of a value in model.dtype, L blocks, D hidden size, Q and K
widths of all query heads and of all key heads, F width of the MLP, H and G numbers of query and key heads,
V vocabulary, N tokens.
"""

from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.core.keys import scalar_keys
from thinwire.models.load import MetaModel
from thinwire.rl.logprobs import CHUNK_LOGIT_BYTES
from thinwire.train.config import Recipe, batch_rows


def longest_row(recipe: Recipe) -> int:
    """Tokens of a row at full prompt and response, rounded up to the length bucket."""
    bucket = recipe.rl.length_bucket
    return -(-(recipe.task.max_prompt_tokens + recipe.sampling.max_new_tokens) // bucket) * bucket


def micro_batch_rows(recipe: Recipe) -> int:
    """Rows of one forward and backward pass."""
    return min(batch_rows(recipe)[1], recipe.sampling.prompts * recipe.sampling.group_size)


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
