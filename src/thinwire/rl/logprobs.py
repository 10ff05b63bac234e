"""Log-probabilities and entropies of tokens without ever holding tokens x vocabulary logits.

Letters in shape suffixes: `N` flat tokens, `C` tokens of one chunk, `D` hidden size, `V` vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from thinwire.core.errors import UserError

CHUNK_LOGIT_BYTES = 64 * 2**20
CUDA_CHUNK_LOGIT_BYTES = 2**30
"""Larger on a GPU: every chunk adds its share of the head's gradient in the head's own type, and in bf16 the
rounding of those sums grows with their number (0.2% of the gradient with 1 chunk, 1.3% with 128)."""


def logprobs_and_entropy(
    hidden_ND: Tensor,
    head: Callable[[Tensor], Tensor],
    target_N: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """log pi(target) and the entropy of pi in nats at every token, pi = softmax(head(hidden) / temperature).

    logprob = logits[target] - logsumexp(logits); entropy = logsumexp(logits) - sum softmax(logits) logits,
    both from logits raised to float32 (float64 stays) before the division by the temperature.
    Differentiable in hidden and in whatever `head` (C, D) -> (C, V) holds. With gradients on and more
    than one chunk, a chunk's logits are dropped after its forward and made again in its backward, so
    that at most `chunk_tokens` x V logits exist at a time (by default 64 MiB of them in float32); a pass
    without gradients computes the same chunks, hence the same bits. The entropy is empty (shape 0) when
    not asked for. N = 0 gives empty tensors.

    Cost: one more product with the head in backward; autograd adds the head's gradient up chunk by chunk,
    with up to two copies of it besides the accumulated one; three tensors of a chunk's logits at a time.
    Not covered: a head that draws ambient random numbers (recomputed differently); logits of -inf, whose
    entropy is nan; changing the chunk changes the order of float additions in the products.
    """
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(hidden_ND, head)
    _check(temperature, chunk_tokens)

    def chunk(hidden_CD: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
        return _chunk(hidden_CD, head, target_C, temperature, with_entropy)

    if hidden_ND.shape[0] <= chunk_tokens:
        return chunk(hidden_ND, target_N)
    pairs = zip(torch.split(hidden_ND, chunk_tokens), torch.split(target_N, chunk_tokens), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(chunk, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    else:
        parts = [chunk(*pair) for pair in pairs]
    return torch.cat([logprob_C for logprob_C, _ in parts]), torch.cat([entropy_C for _, entropy_C in parts])


def default_chunk_tokens(hidden_ND: Tensor, head: Callable[[Tensor], Tensor]) -> int:
    """Tokens whose float32 logits fill 64 MiB (1 GiB on a GPU), at least 1; the head tells V by a call on no
    tokens."""
    with torch.no_grad():
        vocabulary = head(hidden_ND[:0]).shape[-1]
    budget = CUDA_CHUNK_LOGIT_BYTES if hidden_ND.is_cuda else CHUNK_LOGIT_BYTES
    return max(1, budget // (4 * vocabulary))


def _check(temperature: float, chunk_tokens: int) -> None:
    if not temperature > 0.0:
        raise UserError(
            f"sampling.temperature must be > 0, got {temperature}; 1 leaves the logits as they are"
        )
    if chunk_tokens < 1:
        raise UserError(
            f"rl.logprob_chunk_tokens must be >= 1, got {chunk_tokens}; leave it out to use 64 MiB of logits"
        )


def _chunk(
    hidden_CD: Tensor,
    head: Callable[[Tensor], Tensor],
    target_C: Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits_CV = head(hidden_CD)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    outputs: tuple[Tensor, Tensor] = _LogprobAndEntropy.apply(logits_CV, target_C, with_entropy)  # type: ignore[no-untyped-call]
    return outputs


class _LogprobAndEntropy(Function):
    """log p[target] and H = -sum p log p of every row; keeps log p alone and at most two more copies of it.

    d logprob / d logits_v = 1[v = target] - p_v;  d H / d logits_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, target_C: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        log_p_CV = torch.log_softmax(logits_CV, dim=-1)
        logprob_C = log_p_CV.gather(-1, target_C.unsqueeze(-1)).squeeze(-1)
        if with_entropy:
            entropy_C = log_p_CV.exp().mul_(log_p_CV).sum(dim=-1).neg_()
        else:
            entropy_C = logprob_C.new_empty(0)
        ctx.save_for_backward(log_p_CV, target_C, entropy_C)
        ctx.set_materialize_grads(False)
        return logprob_C, entropy_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_C: Tensor | None, grad_entropy_C: Tensor | None) -> Any:
        log_p_CV, target_C, entropy_C = ctx.saved_tensors
        grad_CV = log_p_CV.exp()
        if grad_entropy_C is None or entropy_C.shape != target_C.shape:
            if grad_logprob_C is None:
                return None, None, None
            grad_CV *= -grad_logprob_C.unsqueeze(-1)
        else:
            slope_CV = (log_p_CV + entropy_C.unsqueeze(-1)).mul_(-grad_entropy_C.unsqueeze(-1))
            if grad_logprob_C is not None:
                slope_CV -= grad_logprob_C.unsqueeze(-1)
            grad_CV *= slope_CV
        if grad_logprob_C is not None:
            grad_CV.scatter_add_(-1, target_C.unsqueeze(-1), grad_logprob_C.unsqueeze(-1))
        return grad_CV, None, None
