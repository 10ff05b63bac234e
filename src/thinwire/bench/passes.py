"""Dense passes and passes through a view over the same tokens: hidden states, gradients, log-probabilities.

Letters: B rows, T positions, D hidden size, N response tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.bench.measure import TokenReadings, read_tokens
from thinwire.codecs import Moments, View
from thinwire.core.errors import NonFinite
from thinwire.engines.batch import Batch
from thinwire.models.stages import Stages, split
from thinwire.rl.logprobs import logprobs_and_entropy

LOSS = "L = -(1 / N) sum over the N scored response tokens of A log pi, A = +1 or -1 a rollout, keyed"


@dataclass(frozen=True)
class Subject:
    """The model under measurement, its stages, and the temperature that divides its logits."""

    model: nn.Module
    stages: Stages
    temperature: float = 1.0

    @classmethod
    def of(cls, model: nn.Module, num_stages: int, boundaries: Sequence[int] | None = None) -> "Subject":
        return cls(model, split(model, num_stages, boundaries))

    def at(self, temperature: float) -> "Subject":
        return replace(self, temperature=temperature)

    @property
    def num_boundaries(self) -> int:
        return len(self.stages.after)

    @property
    def hidden_dim(self) -> int:
        return self.stages.hidden_dim

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass(frozen=True)
class Responses:
    """Normed hidden states one position before each response token (N, D), and these tokens (N,)."""

    normed_ND: Tensor
    target_N: Tensor
    row_N: Tensor


@dataclass(frozen=True)
class Dense:
    """A dense pass over one micro-batch: what crossed each boundary, h and dL/dh, both (B, T, D)."""

    batch: Batch
    responses: Responses
    hidden: tuple[Tensor, ...]
    gradient: tuple[Tensor, ...]


def dense_passes(subject: Subject, batches: Sequence[Batch]) -> tuple[list[Dense], list[Tensor]]:
    """Every micro-batch without a codec, and the gradient of the loss in every parameter, fp32."""
    parameters = list(subject.model.parameters())
    total = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    return [_dense_pass(subject, batch, batches, parameters, total) for batch in batches], total


@torch.no_grad()
def hidden_passes(subject: Subject, batches: Sequence[Batch]) -> list[Dense]:
    """Every micro-batch without a codec, forward only: no gradients."""
    passes = []
    for batch in batches:
        hidden: list[Tensor] = []
        seen = _responses(subject, batch, _keeping(hidden))
        passes.append(Dense(batch, seen, tuple(hidden), ()))
    return passes


def statistics(subject: Subject, batches: Sequence[Batch]) -> tuple[tuple[Moments, ...], tuple[Moments, ...]]:
    """Moments of h and of dL/dh at every boundary over the real tokens: what an anchor would see."""
    forward: list[Moments | None] = [None] * subject.num_boundaries
    backward: list[Moments | None] = [None] * subject.num_boundaries
    for batch in batches:
        dense = _dense_pass(subject, batch, batches, [], [])
        mask_BT = batch.token_mask_BT
        for b in range(subject.num_boundaries):
            forward[b] = add_moments(forward[b], dense.hidden[b][mask_BT])
            backward[b] = add_moments(backward[b], dense.gradient[b][mask_BT])
    return _whole(forward), _whole(backward)


def add_moments(moments: Moments | None, values_ND: Tensor) -> Moments:
    """Moments with these tokens added, fp32, as an anchor sums them."""
    values_ND = values_ND.float()
    seen = Moments(len(values_ND), values_ND.sum(0), values_ND.T @ values_ND)
    if moments is None:
        return seen
    return Moments(
        moments.num_tokens + seen.num_tokens,
        moments.sum_D + seen.sum_D,
        moments.second_DD + seen.second_DD,
    )


def view_pass(
    subject: Subject, passes: Sequence[Dense], view: View, *, with_gradient: bool
) -> tuple[TokenReadings, list[Tensor]]:
    """The same tokens through a view: readings of every response token, and the parameters' gradient (fp32;
    empty unless asked for) of the same loss, through the codec at every boundary in both directions.

    NonFinite names the boundary and direction, or the logits, that are not.
    """
    parameters = list(subject.model.parameters()) if with_gradient else []
    total = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    readings = []
    denominator = _num_responses([dense.batch for dense in passes])
    for dense in passes:
        sample_B = dense.batch.sample_B

        def send(hidden_BTD: Tensor, boundary: int, sample_B: Tensor = sample_B) -> Tensor:
            return view.cross(hidden_BTD, boundary, sample_B)

        with torch.set_grad_enabled(with_gradient):
            seen = _responses(subject, dense.batch, send)
            if with_gradient:
                _add_gradient_(total, _loss(subject, dense.batch, seen, denominator), parameters)
        readings.append(
            read_tokens(
                dense.responses.normed_ND,
                seen.normed_ND.detach(),
                seen.target_N,
                subject.stages.head,
                subject.temperature,
            )
        )
    whole = TokenReadings.cat(readings)
    if not bool(torch.isfinite(whole.view_logprob_N).all()):  # what left the last boundary grew too large
        raise NonFinite("logits/forward", math.nan)
    return whole, total


def _dense_pass(
    subject: Subject,
    batch: Batch,
    batches: Sequence[Batch],
    parameters: Sequence[Tensor],
    total: Sequence[Tensor],
) -> Dense:
    hidden: list[Tensor] = []
    seen = _responses(subject, batch, _keeping(hidden))
    loss = _loss(subject, batch, seen, _num_responses(batches))
    gradient = _add_gradient_(total, loss, parameters, hidden)
    detached = Responses(seen.normed_ND.detach(), seen.target_N, seen.row_N)
    return Dense(batch, detached, tuple(h.detach() for h in hidden), tuple(gradient))


def _keeping(hidden: list[Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Sends everything unchanged, and keeps it."""

    def send(hidden_BTD: Tensor, boundary: int) -> Tensor:
        hidden.append(hidden_BTD)
        return hidden_BTD

    return send


def _responses(subject: Subject, batch: Batch, send: Callable[[Tensor, int], Tensor]) -> Responses:
    normed_BTD = subject.stages.forward(batch.input_ids_BT, send)
    row_N, slot_N = batch.response_positions()
    at_N = batch.prompt_length_B[row_N] + slot_N
    return Responses(normed_BTD[row_N, at_N - 1], batch.input_ids_BT[row_N, at_N], row_N)


def _loss(subject: Subject, batch: Batch, seen: Responses, denominator: int) -> Tensor:
    """This micro-batch's share of LOSS."""
    logprob_N, _ = logprobs_and_entropy(
        seen.normed_ND, subject.stages.head, seen.target_N, subject.temperature, with_entropy=False
    )
    return -(batch.advantage_B[seen.row_N] * logprob_N).sum() / denominator


def _add_gradient_(
    total: Sequence[Tensor], loss: Tensor, parameters: Sequence[Tensor], hidden: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Add the loss's gradient to `total`, and give back its gradient in `hidden`."""
    inputs = [*parameters, *hidden]
    shares = torch.autograd.grad(loss, inputs, allow_unused=True)
    for own, share in zip(total, shares, strict=False):
        if share is not None:
            own += share.float()
    rest = zip(hidden, shares[len(parameters) :], strict=True)
    return [torch.zeros_like(h) if share is None else share for h, share in rest]


def _num_responses(batches: Sequence[Batch]) -> int:
    return sum(batch.num_response_tokens for batch in batches)


def _whole(moments: Sequence[Moments | None]) -> tuple[Moments, ...]:
    return tuple(one for one in moments if one is not None)
