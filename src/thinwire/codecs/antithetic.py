"""Antithetic exact-k masks: the two tokens of a pair keep sets that avoid each other.

Letters: N tokens, D hidden size, K channels kept, M entries of the shared permutation.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, CodecState, Direction
from thinwire.codecs.draws import in_slabs, permuted_channels
from thinwire.codecs.kept import KeptChannels
from thinwire.codecs.packing import Sent, saturated
from thinwire.core.keys import TokenKeys


class Antithetic(KeptChannels):
    """h~ = (D / K) 1_S * h, |S| = K, where S and S' of a pair overlap as little as two K-sets can.

    A pair shares a keyed permutation of M = min(2K, D) entries: its even member keeps the first K of them,
    its odd member the last K. Each set alone is a uniform K-subset, so E[h~] = h and
    E||h~ - h||^2 = (D / K - 1) ||h||^2 as for exact-k; the map is symmetric. In a pair (2K <= D) the errors
    have E<e, e'> = -<h, h'>, where independent sets have 0. For h = h' the mean error of the pair has
    E||.||^2 = (D / 2K)^2 f (1 - f) ||h||^2, f = frac(2K / D): nothing at K = D / 2, below that
    (D / 2K - 1) ||h||^2, which is ||h||^2 / 2 less than for independent sets: 5% of it at K = D / 20.
    Source: Hammersley and Morton, "A new Monte Carlo technique: antithetic variates", 1956, applied to masks.

    Wire: 16 K bits a token a boundary, each direction.
    """

    name: Literal["antithetic"] = "antithetic"
    pairs: Literal["positions", "samples", "steps"] = "positions"
    """What pairs 2j with 2j + 1: "positions" of a row; "samples" (members of a group, whose prompt tokens
    are equal, where sampling.group_size is even); or "steps" (the same slot of the batch, other text)."""

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """S for every token: distinct channel indices (N, K)."""
        hidden_dim, keep = self.hidden_dim, self.values_per_token()
        num = min(2 * keep, hidden_dim)

        def slab(keys: TokenKeys) -> Tensor:
            shared, odd_N = self._pair(keys)
            entries_NM = permuted_channels(shared, boundary, hidden_dim, num)
            return torch.where(odd_N[..., None], entries_NM[..., num - keep :], entries_NM[..., :keep])

        return in_slabs(keys, num, slab)

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        assert draw is not None
        kept_NK = hidden_ND.gather(-1, draw.long()).float()
        return (saturated(kept_NK * (self.hidden_dim / self.values_per_token()), PAYLOAD_DTYPE),)

    @property
    def unbiased(self) -> frozenset[Direction]:
        return frozenset(("forward", "backward"))

    def _pair(self, keys: TokenKeys) -> tuple[TokenKeys, Tensor]:
        """The keys that both members share, and which tokens are odd members."""
        if self.pairs == "positions":
            return replace(keys, position_N=keys.position_N // 2), keys.position_N % 2 == 1
        if self.pairs == "samples":
            return replace(keys, sample_N=keys.sample_N // 2), keys.sample_N % 2 == 1
        return replace(keys, step=keys.step // 2), torch.full_like(keys.sample_N, keys.step % 2) == 1
