"""The pseudo-random reference codec: k of D channels, drawn afresh for every token of every step."""

from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, Codec, CodecState, Direction, resolve_kept
from thinwire.codecs.packing import Field, Sent, floats
from thinwire.core.keys import Stream, TokenKeys, permutation_prefix


class ExactK(Codec):
    """h~ = (D / K) 1_S * h with |S| = K always, S a keyed uniform K-subset of the channels.

    Unbiased over S: E[h~] = h, E||h~ - h||^2 = (D / K - 1) ||h||^2. S is the first K entries of a keyed
    permutation of (seed, boundary, step, sample, position), so both ends derive it and it costs no bits.
    The map is symmetric: the backward pass keeps the same channels of the gradient, times D / K.

    Wire: 16 K bits a token a boundary, each direction; no side channel.
    Not covered: rounding the sent values to bf16 adds a relative error of 2^-9 a value.
    """

    name: Literal["exact-k"] = "exact-k"
    keep: int | None = None
    """K, channels sent per token, 1..D; default round(0.05 D)."""
    bits_per_value: float | None = None
    """Budget instead of keep: K = floor(bits_per_value D / 16)."""

    def at_width(self, hidden_dim: int) -> Self:
        keep = resolve_kept("codec.keep", self.keep, self.bits_per_value, hidden_dim)
        return self.model_copy(update={"hidden_dim": hidden_dim, "keep": keep, "bits_per_value": None})

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """S for every token: distinct channel indices (N, K), int16 where D allows (a step keeps them)."""
        kept_NK = permutation_prefix(
            keys, Stream.ACTIVATION_MASK, boundary, self.hidden_dim, self.values_per_token()
        )
        return kept_NK.to(torch.int16) if self.hidden_dim < 1 << 15 else kept_NK

    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        return (floats(self.values_per_token(), PAYLOAD_DTYPE),)

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        assert draw is not None
        kept_NK = hidden_ND.gather(-1, draw.long())
        return ((kept_NK.float() * (self.hidden_dim / self.values_per_token())).to(PAYLOAD_DTYPE),)

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        assert draw is not None
        (values_NK,) = sent
        shape = (*values_NK.shape[:-1], self.hidden_dim)
        wide = torch.promote_types(values_NK.dtype, torch.float32)
        decoded_ND = torch.zeros(shape, dtype=wide, device=values_NK.device)
        return decoded_ND.scatter_(-1, draw.long(), values_NK.to(wide))

    @property
    def unbiased(self) -> frozenset[Direction]:
        return frozenset(("forward", "backward"))

    @property
    def can_change_bits(self) -> bool:
        return True

    def with_bits(self, bits_per_value: float) -> Self:
        keep = resolve_kept("codec.keep", None, bits_per_value, self.hidden_dim)
        return self.model_copy(update={"keep": keep})

    def values_per_token(self) -> int:
        """K."""
        assert self.keep is not None
        return self.keep
