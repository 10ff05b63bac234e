"""Sampling in this process from a transformers model, with a key-value cache and keyed draws.

Letters in shape suffixes: `B` rows being decoded, `P` prompt positions (padded at the left), `T` cached
positions, `R` response positions, `V` vocabulary, `U` distinct prompts.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from thinwire.core.errors import UserError
from thinwire.core.keys import Stream, TokenKeys, uniforms
from thinwire.sampling.base import Rollouts, SamplingConfig
from thinwire.sampling.distribution import inverse_cdf, log_distribution, refuse_unless

# Values of one block of logits while tokens are drawn: 8M values are 64 MB in float64, so 55 rows at a
# vocabulary of 151,936; the draw of 256 such rows would otherwise hold 300 MB several times over.
_DRAW_VALUES = 8 << 20


class HFSampler:
    """Samples from `model`, which may be the trainer's own: the pushed weights are then no copy.

    Dense by assertion: no forward hook may stand on any submodule, and dropout is off while sampling.
    Rows that end leave the batch. Not covered: two batchings may round a logit differently in the last
    bit; a keyed draw that falls into that gap (about 1e-7 of them a token in float32) then differs.
    """

    def __init__(self, model: Any, eos_ids: frozenset[int], pad_id: int) -> None:
        self.model = model
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.version = 0
        # transformers renamed past_key_values to cache during its fifth version.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.no_grad()
    def push(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights by name, converted to the model's number format; all of them or none.

        A tensor that already is the parameter (same memory, same format) is not copied. Tied weights may
        come under any of their names. Nothing changes unless every name and shape fits.
        """
        own = self.model.state_dict(keep_vars=True)
        unknown = sorted(tensors.keys() - own.keys())
        wrong = [name for name in tensors if name in own and tensors[name].shape != own[name].shape]
        given = {own[name].data_ptr(): tensor for name, tensor in tensors.items() if name in own}
        missing = [
            name for name, parameter in self.model.named_parameters() if parameter.data_ptr() not in given
        ]
        untied = (
            []
            if unknown or wrong
            else [
                name
                for name, tensor in tensors.items()
                if (twin := given[own[name].data_ptr()]) is not tensor and not torch.equal(twin, tensor)
            ]
        )
        if unknown or missing or wrong or untied:
            raise ValueError(
                f"pushed weights do not fit the sampler: unknown {unknown[:3]}, missing {missing[:3]}, "
                f"of another shape {wrong[:3]}, tied here but not there {untied[:3]}"
            )
        for name, tensor in tensors.items():
            target = own[name]
            if target.data_ptr() != tensor.data_ptr() or target.dtype != tensor.dtype:
                target.copy_(tensor)
        self.version = version

    @torch.no_grad()
    def sample(
        self,
        prompt_ids: Sequence[Sequence[int]],
        *,
        seed: int,
        step: int,
        group_size: int,
        config: SamplingConfig,
        sample_ids: Sequence[int] | None = None,
    ) -> Rollouts:
        """`group_size` responses to every prompt, at most `config.batch_rows` rows at a time.

        Gradients are off by no_grad, not inference_mode: a rotary embedding that adapts to the length
        stores its frequencies in the model, and an inference tensor there would break later training.
        """
        prompts = [list(prompt) for prompt in prompt_ids for _ in range(group_size)]
        samples = list(range(len(prompts)) if sample_ids is None else sample_ids)
        if len(samples) != len(prompts) or not all(prompts):
            raise ValueError(
                f"{len(prompts)} rows need as many sample ids (got {len(samples)}) and no empty prompt"
            )
        self._refuse_unknown_tokens(prompts)
        assert_dense(self.model)
        draw = _Draw(config, seed, step, self._eos_mask())
        rows = _Responses([], [], [])
        batch_rows = config.batch_rows or max(1, len(prompts))
        with _eval_mode(self.model):
            for start in range(0, len(prompts), batch_rows):
                batch = slice(start, start + batch_rows)
                rows.extend(self._decode(prompts[batch], samples[batch], draw))
        return Rollouts(prompts, rows.tokens, rows.logprobs, rows.finished, samples, self.version)

    def _refuse_unknown_tokens(self, prompts: list[list[int]]) -> None:
        num_embeddings = int(self.model.get_input_embeddings().weight.shape[0])
        largest = max((max(prompt) for prompt in prompts), default=0)
        if largest >= num_embeddings:
            raise UserError(
                f"a prompt holds token {largest}, but the model has {num_embeddings} embeddings; take model "
                "and tokenizer from one source"
            )

    def _decode(self, prompts: list[list[int]], samples: list[int], draw: "_Draw") -> "_Responses":
        """Responses of one batch: prefill, then one forward a token over the rows still open."""
        num_tokens, device = draw.config.max_new_tokens, self.model.device
        logits_BV, live = self._prefill(prompts, samples, num_tokens)
        token_BR = torch.zeros(len(prompts), num_tokens, dtype=torch.int64, device=device)
        logprob_BR = torch.zeros(len(prompts), num_tokens, device=device)
        length_B = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        finished_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        for offset in range(num_tokens):
            token_B, logprob_B = draw(logits_BV, live.sample_B, live.position_B, offset)
            token_BR[live.row_B, offset], logprob_BR[live.row_B, offset] = token_B, logprob_B
            length_B[live.row_B] += 1
            ended_B = draw.eos_V[token_B]
            finished_B[live.row_B] = ended_B
            if offset + 1 == num_tokens or bool(ended_B.all()):
                break
            if bool(ended_B.any()):
                open_B = (~ended_B).nonzero().squeeze(1)
                token_B = token_B[open_B]
                live.select_(open_B)
            logits_BV = self._forward(token_B.unsqueeze(1), live, live.position_B.unsqueeze(1))
            live.position_B += 1
        return _Responses.trim(token_BR, logprob_BR, length_B, finished_B)

    def _prefill(
        self, prompts: list[list[int]], samples: list[int], num_tokens: int
    ) -> tuple[Tensor, "_Live"]:
        """Next-token logits of every row; each distinct prompt is computed once and its cache repeated."""
        device = self.model.device
        distinct = {prompt: u for u, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        width = max(map(len, distinct))
        ids_UP = torch.tensor([[self.pad_id] * (width - len(p)) + list(p) for p in distinct], device=device)
        mask_UT = torch.ones(len(distinct), width + num_tokens, dtype=torch.bool, device=device)
        for u, prompt in enumerate(distinct):
            mask_UT[u, : width - len(prompt)] = False
        length_U = torch.tensor([len(prompt) for prompt in distinct], device=device)
        row_U = torch.arange(len(distinct), device=device)
        live = _Live(row_U, row_U, length_U, mask_UT, DynamicCache(config=self.model.config))
        position_UP = (mask_UT[:, :width].long().cumsum(1) - 1).clamp(min=0)
        logits_UV = self._forward(ids_UP, live, position_UP)
        prompt_B = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=device)
        live.select_(prompt_B)
        live.row_B = torch.arange(len(prompts), device=device)
        live.sample_B = torch.tensor(samples, dtype=torch.int64, device=device)
        return logits_UV[prompt_B], live

    def _forward(self, ids_BP: Tensor, live: "_Live", position_BP: Tensor) -> Tensor:
        """float32 logits after the last of the given tokens, (B, V); their keys and values are cached."""
        num_cached = live.cache.get_seq_length() + ids_BP.shape[1]
        output = self.model(
            input_ids=ids_BP,
            attention_mask=live.mask_BT[:, :num_cached],
            position_ids=position_BP,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: live.cache},
        )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV

    def _eos_mask(self) -> Tensor:
        vocab_size = self.model.get_output_embeddings().weight.shape[0]
        eos_V = torch.zeros(vocab_size, dtype=torch.bool, device=self.model.device)
        eos_V[sorted(i for i in self.eos_ids if i < vocab_size)] = True
        return eos_V


@dataclass
class _Live:
    """The rows still being decoded. `position_B` is the position of the token to be drawn next, counted
    from the first real token of the row; `mask_BT` is True on real tokens and on all that follow."""

    row_B: Tensor
    sample_B: Tensor
    position_B: Tensor
    mask_BT: Tensor
    cache: Any

    def select_(self, index_B: Tensor) -> None:
        """Keep (or repeat) these rows, everywhere."""
        self.row_B, self.sample_B = self.row_B[index_B], self.sample_B[index_B]
        self.position_B, self.mask_BT = self.position_B[index_B], self.mask_BT[index_B]
        self.cache.batch_select_indices(index_B)


@dataclass
class _Responses:
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]

    @classmethod
    def trim(cls, token_BR: Tensor, logprob_BR: Tensor, length_B: Tensor, finished_B: Tensor) -> "_Responses":
        lengths = length_B.tolist()
        tokens = [row[:n] for row, n in zip(token_BR.tolist(), lengths, strict=True)]
        logprobs = [row[:n] for row, n in zip(logprob_BR.tolist(), lengths, strict=True)]
        return cls(tokens, logprobs, finished_B.tolist())

    def extend(self, other: "_Responses") -> None:
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.finished += other.finished


@dataclass(frozen=True)
class _Draw:
    """Draws the next token of every row from its logits, with the keyed uniform of its own position."""

    config: SamplingConfig
    seed: int
    step: int
    eos_V: Tensor

    def __call__(
        self, logits_BV: Tensor, sample_B: Tensor, position_B: Tensor, offset: int
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities, both (B,); `offset` counts the response tokens before."""
        if offset < self.config.min_new_tokens:
            logits_BV = logits_BV.masked_fill(self.eos_V, -torch.inf)
        if self.config.temperature == 0.0:
            top_B, token_B = logits_BV.max(-1)
            refuse_unless(top_B.isfinite())
            return token_B, torch.zeros_like(top_B)
        keys = TokenKeys(self.seed, self.step, sample_B, position_B)
        uniform_B = uniforms(keys, Stream.SAMPLER, boundary=0, num=1).squeeze(-1)
        block_rows = max(1, _DRAW_VALUES // logits_BV.shape[1])
        parts = [
            inverse_cdf(log_distribution(logits, self.config), uniform)
            for logits, uniform in zip(
                torch.split(logits_BV, block_rows), torch.split(uniform_B, block_rows), strict=True
            )
        ]
        return torch.cat([token for token, _ in parts]), torch.cat([logprob for _, logprob in parts])


def assert_dense(model: nn.Module) -> None:
    """No forward hook stands on the model: a codec left on would compress what must be sampled densely.

    transformers' own recorders of hidden states stay on a model once used; they change nothing and pass.
    """
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if hook.__module__ != "transformers.utils.output_capturing"]
        assert not foreign, (
            f"the sampler must see the dense model, but {name or 'the model'} has the hook {foreign[0]}"
        )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, every submodule's own mode restored after.

    Besides dropout this matters for gradient checkpointing: in training mode some versions of transformers
    silently drop the key-value cache of a checkpointed block.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
