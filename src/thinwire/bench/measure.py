"""Readings of tokens seen dense and through a view: gap, full-vocabulary KL, entropies, intervals.

Letters: N response tokens, C tokens of one chunk, D hidden size, V vocabulary, S sequences, R resamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.rl.logprobs import default_chunk_tokens

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class TokenReadings:
    """Per response token, float64 on the CPU, all (N,): log pi of the token dense and through the view,
    KL(dense || view) over the whole vocabulary, and both entropies, in nats."""

    dense_logprob_N: Tensor
    view_logprob_N: Tensor
    kl_N: Tensor
    dense_entropy_N: Tensor
    view_entropy_N: Tensor

    @property
    def gap_N(self) -> Tensor:
        """log pi_dense - log pi_view of the sampled token."""
        return self.dense_logprob_N - self.view_logprob_N

    @classmethod
    def cat(cls, parts: Sequence["TokenReadings"]) -> "TokenReadings":
        return cls(*(torch.cat(columns) for columns in zip(*map(_columns, parts), strict=True)))

    @classmethod
    def mean(cls, draws: Sequence["TokenReadings"]) -> "TokenReadings":
        """Token by token, the mean over draws."""
        return cls(*(torch.stack(columns).mean(0) for columns in zip(*map(_columns, draws), strict=True)))


def _columns(readings: TokenReadings) -> tuple[Tensor, ...]:
    return (
        readings.dense_logprob_N,
        readings.view_logprob_N,
        readings.kl_N,
        readings.dense_entropy_N,
        readings.view_entropy_N,
    )


@torch.no_grad()
def read_tokens(
    dense_ND: Tensor,
    view_ND: Tensor,
    target_N: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    chunk_tokens: int | None = None,
) -> TokenReadings:
    """Both distributions of every token, softmax(head(normed) / temperature), a chunk of tokens at a time.

    KL(dense || view) = sum_v p_v (log p_v - log q_v), H = -sum_v p_v log p_v, in fp32 over the vocabulary.
    Memory: a few tensors of `chunk_tokens` x V (64 MiB each by default).
    """
    size = chunk_tokens or default_chunk_tokens(dense_ND, head)
    parts = []
    for start in range(0, len(target_N), size):
        chunk = slice(start, start + size)
        log_p_CV = _log_softmax(head(dense_ND[chunk]), temperature)
        log_q_CV = _log_softmax(head(view_ND[chunk]), temperature)
        target_C1 = target_N[chunk, None]
        p_CV = log_p_CV.exp()
        columns = (
            log_p_CV.gather(1, target_C1).squeeze(1),
            log_q_CV.gather(1, target_C1).squeeze(1),
            (p_CV * (log_p_CV - log_q_CV)).sum(1),
            -(p_CV * log_p_CV).sum(1),
            -(log_q_CV.exp() * log_q_CV).sum(1),
        )
        parts.append(TokenReadings(*(column.double().cpu() for column in columns)))
    return TokenReadings.cat(parts)


def _log_softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return torch.log_softmax(logits_CV / temperature, dim=-1)


def mean_with_interval(value_N: Tensor, sequence_N: Tensor, seed: int) -> dict[str, float]:
    """Token mean, and its 95% percentile interval by bootstrap over sequences.

    Each of NUM_RESAMPLES resamples draws S of S sequences with replacement (numpy's PCG64, `seed`) and takes
    sum of values / number of tokens. Not covered: fewer than about 20 sequences, where it is too narrow; one
    draw of the codec is as good as many only where tokens average it out.
    """
    sums_S, counts_S = by_sequence(value_N, sequence_N)
    num = len(sums_S)
    chosen_RS = np.random.default_rng(seed).integers(0, num, (NUM_RESAMPLES, num))
    mean_R = sums_S[chosen_RS].sum(1) / counts_S[chosen_RS].sum(1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(mean_R, [tail, 100 - tail])
    return {"mean": float(sums_S.sum() / counts_S.sum()), "low": float(low), "high": float(high)}


def by_sequence(value_N: Tensor, sequence_N: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum of the values and number of tokens of every sequence (S,), in order of the sequences' numbers."""
    _, index_N = torch.unique(sequence_N.cpu(), return_inverse=True)
    num = int(index_N.max()) + 1
    sums_S = torch.zeros(num, dtype=torch.float64).index_add_(0, index_N, value_N.double().cpu())
    return sums_S.numpy(), torch.bincount(index_N, minlength=num).double().numpy()


def summarise(draws: Sequence[TokenReadings], sequence_N: Tensor, seed: int) -> dict[str, Any]:
    """Gap and KL with intervals, and both entropies: means over tokens of the means over draws."""
    readings = TokenReadings.mean(draws)
    return {
        "gap": mean_with_interval(readings.gap_N, sequence_N, seed),
        "kl": mean_with_interval(readings.kl_N, sequence_N, seed),
        "entropy": {
            "view": float(readings.view_entropy_N.mean()),
            "dense": float(readings.dense_entropy_N.mean()),
        },
    }
