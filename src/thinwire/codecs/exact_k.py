"""The pseudo-random reference codec: k of D channels, drawn afresh for every token of every step."""

from typing import Literal

from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, CodecState, Direction
from thinwire.codecs.draws import permuted_channels
from thinwire.codecs.kept import KeptChannels
from thinwire.codecs.packing import Sent, saturated
from thinwire.core.keys import TokenKeys


class ExactK(KeptChannels):
    """h~ = (D / K) 1_S * h with |S| = K always, S a keyed uniform K-subset of the channels.

    Unbiased over S: E[h~] = h, E||h~ - h||^2 = (D / K - 1) ||h||^2. S is the first K entries of a keyed
    permutation of (seed, boundary, step, sample, position), so both ends derive it and it costs no bits.
    The map is symmetric: the backward pass keeps the same channels of the gradient, times D / K.

    Wire: 16 K bits a token a boundary, each direction; no side channel.
    Not covered: rounding the sent values to bf16 adds a relative error of 2^-9 a value.
    """

    name: Literal["exact-k"] = "exact-k"

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """S for every token: distinct channel indices (N, K), int16 where D allows (a step keeps them)."""
        return permuted_channels(keys, boundary, self.hidden_dim, self.values_per_token())

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        assert draw is not None
        kept_NK = hidden_ND.gather(-1, draw.long()).float()
        return (saturated(kept_NK * (self.hidden_dim / self.values_per_token()), PAYLOAD_DTYPE),)

    @property
    def unbiased(self) -> frozenset[Direction]:
        return frozenset(("forward", "backward"))
