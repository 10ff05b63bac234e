"""Splitting a decoder-only model into pipeline stages that call the model's own forward.

Letters: B rows, T positions, D hidden size, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.errors import UserError


def boundaries(num_layers: int, num_stages: int, chosen: Sequence[int] | None = None) -> list[int]:
    """0-based index of the last block of every stage but the last; `chosen` ones are only checked.

    L = q S + m: the first m stages hold q + 1 blocks, the others q (28 in 8 -> 3, 7, 11, 15, 18, 21,
    24; 30 in 8 -> 3, 7, 11, 15, 19, 23, 26). One stage has no boundary.
    """
    if not 1 <= num_stages <= num_layers:
        raise UserError(
            f"model.stages must be in 1..{num_layers} (the model has {num_layers} blocks), got {num_stages}"
        )
    if chosen is not None:
        if list(chosen) != sorted(set(chosen)) or not all(0 <= block < num_layers - 1 for block in chosen):
            raise UserError(
                f"model.boundaries must rise within 0..{num_layers - 2} (the model has {num_layers} blocks), "
                f"got {list(chosen)}"
            )
        if len(chosen) != num_stages - 1:
            raise UserError(
                f"model.boundaries = {list(chosen)} makes {len(chosen) + 1} stages, but model.stages = "
                f"{num_stages}; set model.stages = {len(chosen) + 1}"
            )
        return list(chosen)
    quotient, remainder = divmod(num_layers, num_stages)
    sizes = [quotient + (stage < remainder) for stage in range(num_stages)]
    return [sum(sizes[: stage + 1]) - 1 for stage in range(num_stages - 1)]


@dataclass(frozen=True)
class Stages:
    """A model as a list of stage functions over the model's own (shared) parameters.

    `blocks[s](input_ids or hidden) -> hidden`; the last one applies the final norm. `head` maps normed
    hidden states to logits. `after` holds the boundaries' block indices.
    """

    blocks: tuple[Callable[[Tensor], Tensor], ...]
    modules: tuple[nn.Module, ...]
    head: Callable[[Tensor], Tensor]
    after: tuple[int, ...]
    hidden_dim: int

    def forward(self, input_ids_BT: Tensor, send: Callable[[Tensor, int], Tensor] | None) -> Tensor:
        """Normed hidden states (B, T, D) of right-padded rows; `send(hidden, boundary)` at each boundary.

        No attention mask is needed: padding stands at the right of every row, and attention is causal.
        """
        hidden = input_ids_BT
        for stage, block in enumerate(self.blocks):
            hidden = block(hidden)
            if send is not None and stage < len(self.after):
                hidden = send(hidden, stage)
        return hidden


def split(
    model: nn.Module, num_stages: int, chosen: Sequence[int] | None = None, *, verify: bool = True
) -> Stages:
    """Split a transformers causal LM into stages without copying a parameter.

    Each stage is a shallow copy of the decoder whose `layers` is a slice and whose `norm` is the identity
    (but in the last), so masks, rotary embeddings and layer types stay the architecture's own code.
    `verify` runs a few tokens and refuses an architecture whose stages do not reproduce the model.
    """
    decoder = _decoder(model)
    config: Any = decoder.config
    after = boundaries(len(decoder.layers), num_stages, chosen)
    edges = [0, *(index + 1 for index in after), len(decoder.layers)]
    modules = tuple(
        _stage_module(decoder, edges[s], edges[s + 1], last=s == num_stages - 1) for s in range(num_stages)
    )
    blocks = tuple(_stage_function(module, first=s == 0) for s, module in enumerate(modules))
    stages = Stages(blocks, modules, _head(model), tuple(after), int(config.hidden_size))
    if verify:
        _verify(model, stages)
    return stages


def _decoder(model: nn.Module) -> Any:
    decoder = getattr(model, "model", None)
    if decoder is None or not all(hasattr(decoder, part) for part in ("layers", "norm", "embed_tokens")):
        raise UserError(
            f"model.path holds a {type(model).__name__}, which has no `model.layers`, `model.norm` and "
            "`model.embed_tokens` to split into stages; use a decoder-only model of that layout "
            "(Llama, Qwen2, Qwen3, SmolLM, Mistral, ...)"
        )
    return decoder


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
    return head


def _stage_module(decoder: Any, first_block: int, end_block: int, *, last: bool) -> nn.Module:
    """A decoder over blocks first_block..end_block-1 that shares the parameters of the whole one."""
    module = copy.copy(decoder)
    module._modules = dict(decoder._modules)
    module.config = copy.deepcopy(decoder.config)
    module.config.num_hidden_layers = end_block - first_block
    if getattr(module.config, "layer_types", None) is not None:
        module.config.layer_types = module.config.layer_types[first_block:end_block]
    module.layers = nn.ModuleList(decoder.layers[first_block:end_block])
    if first_block > 0:
        module.embed_tokens = None
    if not last:
        module.norm = nn.Identity()
    stage: nn.Module = module
    return stage


def _stage_function(module: nn.Module, *, first: bool) -> Callable[[Tensor], Tensor]:
    name = "input_ids" if first else "inputs_embeds"

    def run(tokens_or_hidden: Tensor) -> Tensor:
        hidden: Tensor = module(**{name: tokens_or_hidden}, use_cache=False).last_hidden_state
        return hidden

    return run


@torch.no_grad()
def _verify(model: Any, stages: Stages) -> None:
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    expected = model(input_ids=ids, use_cache=False).logits
    if not expected.isfinite().all():
        raise UserError(
            "model.path holds a model whose logits are not finite: its weights hold NaN or inf, or "
            f"overflow in {expected.dtype}; take other weights or another model.dtype"
        )
    got = stages.head(stages.forward(ids, None))
    if not torch.equal(expected, got):
        raise UserError(
            f"model.path holds a {type(model).__name__}, whose stages do not reproduce the whole model "
            "(it does more between its blocks or after its head than the supported layout)"
        )


def stage_of_parameters(stages: Stages, named: Sequence[str]) -> list[int]:
    """For every parameter name of the whole model the stage that owns it: embeddings belong to the
    first, the final norm and an untied head to the last, block i to its stage."""
    owner = []
    for name in named:
        parts = name.split(".")
        if "layers" in parts:
            block = int(parts[parts.index("layers") + 1])
            owner.append(sum(block > edge for edge in stages.after))
        else:
            owner.append(0 if "embed_tokens" in parts else len(stages.blocks) - 1)
    return owner
