"""Bernoulli mask: every channel kept by its own coin, in a payload whose size may not vary.

Letters: N tokens, D hidden size, K capacity of a token's payload in values.
"""

from decimal import Context, Decimal
from functools import lru_cache
from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, CodecState, Direction
from thinwire.codecs.draws import in_slabs, marked, permuted_channels, unmarked
from thinwire.codecs.kept import KeptChannels
from thinwire.codecs.packing import Sent, saturated
from thinwire.core.errors import UserError
from thinwire.core.keys import Stream, TokenKeys, words

_PRECISE = Context(prec=50)


class Bernoulli(KeptChannels):
    """h~ = (1 / pi) m * h, m_i independent coins of probability p, at most K of them kept.

    The number of ones C ~ Binomial(D, p) varies and the payload must not, so p is the largest with
    P(C > K) <= `overflow`. A token with C > K keeps K of its C channels, chosen uniformly; the scale
    pi = E[min(C, K)] / D is the true chance of a channel, so the code stays exactly unbiased: E[h~] = h,
    E||h~ - h||^2 = (1 / pi - 1) ||h||^2. At overflow 1e-9 the unused slots cost much of the budget:
    K = 77 of D = 1536 allows p = 0.0238 (37 slots used on average, error 41 ||h||^2 where exact-k has 19),
    29 of 576 p = 0.0137 (8 used; 72 against 19), 6 of 128 p = 0.0014 (0.2 used; 698 against 20).
    Both ends know C and the channels; the unused slots are sent as zeros. The map is symmetric.
    Source: Konecny and Richtarik, "Randomized distributed mean estimation", 2018.

    Wire: 16 K bits a token a boundary, each direction, whatever C is.
    Not covered: a small width; one slot of D = 7 allows p = 7e-6, unbiased and useless.
    """

    name: Literal["bernoulli"] = "bernoulli"
    overflow: float = 1e-9
    """Largest chance, inside (0, 1), that a token has more ones than the payload has slots."""

    def at_width(self, hidden_dim: int) -> Self:
        if not 0.0 < self.overflow < 1.0:
            raise UserError(f"codec.overflow must be inside (0, 1), got {self.overflow}")
        return super().at_width(hidden_dim)

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """K distinct channels per token, the unused ones marked: C by inversion of its distribution, then C
        channels without replacement, which is how independent coins fall given their sum."""
        thresholds = torch.tensor(self._table()[0], dtype=torch.int64, device=keys.sample_N.device)

        def slab(keys: TokenKeys) -> Tensor:
            word_N1 = words(keys, Stream.ACTIVATION_NOISE, boundary, 1)
            count_N1 = torch.searchsorted(thresholds, word_N1.contiguous(), right=True)
            chosen_NK = permuted_channels(keys, boundary, self.hidden_dim, self.values_per_token())
            slot_K = torch.arange(self.values_per_token(), device=chosen_NK.device)
            return marked(chosen_NK, slot_K >= count_N1)

        return in_slabs(keys, self.values_per_token(), slab)

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        assert draw is not None
        channel_NK, unused_NK = unmarked(draw)
        scaled_NK = hidden_ND.gather(-1, channel_NK).float() / self.kept_share
        return (saturated(scaled_NK.masked_fill(unused_NK, 0.0), PAYLOAD_DTYPE),)

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        assert draw is not None
        return super().decode(sent, unmarked(draw)[0], state)

    @property
    def kept_share(self) -> float:
        """pi = E[min(C, K)] / D, the chance that a channel is sent."""
        return self._table()[1]

    @property
    def coin(self) -> float:
        """p, the chance of each channel before the capacity counts."""
        return float(_largest_coin(self.hidden_dim, self.values_per_token(), self.overflow))

    @property
    def unbiased(self) -> frozenset[Direction]:
        return frozenset(("forward", "backward"))

    def _table(self) -> tuple[tuple[int, ...], float]:
        return _count_table(self.hidden_dim, self.values_per_token(), self.overflow)


@lru_cache(maxsize=64)
def _count_table(hidden_dim: int, capacity: int, overflow: float) -> tuple[tuple[int, ...], float]:
    """t_c = floor(2^32 P(C <= c)) for c < K, and pi; min(C, K) = number of t_c <= a keyed word.

    In decimal arithmetic, so that both ends of a wire hold the same integers whatever their libm.
    """
    cumulative = _cumulative(hidden_dim, capacity, _largest_coin(hidden_dim, capacity, overflow))
    thresholds = tuple(int(_PRECISE.multiply(share, Decimal(1 << 32))) for share in cumulative[:capacity])
    return thresholds, sum((1 << 32) - t for t in thresholds) / ((1 << 32) * hidden_dim)


def _largest_coin(hidden_dim: int, capacity: int, overflow: float) -> Decimal:
    """The largest p (to 2^-64) with P(Binomial(D, p) > K) <= overflow; 1 where K = D."""
    if capacity == hidden_dim:
        return Decimal(1)
    low, high = Decimal(0), Decimal(1)
    for _ in range(64):
        middle = _PRECISE.divide(_PRECISE.add(low, high), Decimal(2))
        tail = _PRECISE.subtract(Decimal(1), _cumulative(hidden_dim, capacity, middle)[capacity])
        low, high = (middle, high) if tail <= Decimal(overflow) else (low, middle)
    return low


def _cumulative(hidden_dim: int, capacity: int, coin: Decimal) -> list[Decimal]:
    """P(C <= c) for c = 0..K: P(c + 1) = P(c) (D - c) / (c + 1) p / (1 - p)."""
    if coin == 1:
        return [Decimal(int(count == hidden_dim)) for count in range(capacity + 1)]
    tails = _PRECISE.subtract(Decimal(1), coin)
    odds = _PRECISE.divide(coin, tails)
    mass = _PRECISE.power(tails, hidden_dim)
    total, shares = mass, [mass]
    for count in range(capacity):
        mass = _PRECISE.multiply(mass, _PRECISE.multiply(odds, Decimal(hidden_dim - count)))
        mass = _PRECISE.divide(mass, Decimal(count + 1))
        total = _PRECISE.add(total, mass)
        shares.append(total)
    return shares
