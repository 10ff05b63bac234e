"""Blockwise rounding to b bits, stochastic or to nearest, of a keyed subset of the channels.

Letters: N tokens, D hidden size, K channels sent, S blocks of them, C columns of the draw.
"""

from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, CodecState, Direction
from thinwire.codecs.budget import in_range, resolve_within
from thinwire.codecs.draws import dither, in_slabs, kept_channels, scatter_channels, uniforms_of
from thinwire.codecs.packing import Field, Sent, bytes_per_token
from thinwire.codecs.quantise import block_layout, dequantise_blocks, quantise_blocks
from thinwire.core.keys import Stream, TokenKeys


class BlockRounding(Codec):
    """What both roundings share: h~ = (D / K) 1_S * h on a b-bit grid, one scale a block of kept channels.

    The factor D / K is applied before rounding, so nothing that is decoded leaves fp32.
    """

    bits: int = 2
    """b, bits a kept channel, 1..8."""
    block: int = 32
    """Kept channels that share one scale, at least 1."""
    scale_bits: int = 12
    """Bits of a scale, 8..15: 8 of exponent, the others of mantissa; rounded up from max|v| of its block."""
    keep: int | None = None
    """K, channels sent per token, 1..D; default as many as the budget holds."""
    bits_per_value: float | None = None
    """Budget instead of keep: the largest K <= D whose whole bytes are at most bits_per_value D bits."""

    def at_width(self, hidden_dim: int) -> Self:
        in_range("codec.bits", self.bits, 1, 8)
        in_range("codec.block", self.block, 1, 1 << 20)
        in_range("codec.scale_bits", self.scale_bits, 8, 15)
        keep = resolve_within(self.keep, self.bits_per_value, hidden_dim, self._bits_of)
        return self.model_copy(update={"hidden_dim": hidden_dim, "keep": keep, "bits_per_value": None})

    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        return block_layout(self.values_per_token(), self.block, self.bits, self.scale_bits)

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """S for every token, ascending, then what rounding needs: (N, C)."""
        return in_slabs(keys, self.values_per_token(), lambda slab: self._draw_slab(slab, boundary))

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        return self._rounded(hidden_ND, draw, "forward")

    def encode_gradient(self, gradient_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        return self._rounded(gradient_ND, draw, "backward")

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        assert draw is not None
        values_NK = dequantise_blocks(sent, self.block, self.bits, self.scale_bits)
        return scatter_channels(values_NK, draw[..., : self.values_per_token()], self.hidden_dim)

    @property
    def is_linear(self) -> bool:
        return False

    @property
    def can_change_bits(self) -> bool:
        return True

    def with_bits(self, bits_per_value: float) -> Self:
        keep = resolve_within(None, bits_per_value, self.hidden_dim, self._bits_of)
        return self.model_copy(update={"keep": keep})

    def values_per_token(self) -> int:
        """K."""
        assert self.keep is not None
        return self.keep

    def _draw_slab(self, keys: TokenKeys, boundary: int) -> Tensor:
        return kept_channels(keys, boundary, self.hidden_dim, self.values_per_token())

    def _offset(self, draw: Tensor, direction: Direction) -> Tensor | float:
        """What is added before the floor: see `quantise_blocks`."""
        return 0.5

    def _rounded(self, values_ND: Tensor, draw: Tensor | None, direction: Direction) -> Sent:
        assert draw is not None
        keep = self.values_per_token()
        kept_NK = values_ND.gather(-1, draw[..., :keep].long()).float() * (self.hidden_dim / keep)
        offset = self._offset(draw, direction)
        return quantise_blocks(kept_NK, self.block, self.bits, self.scale_bits, offset)

    def _bits_of(self, keep: int) -> int:
        return 8 * bytes_per_token(block_layout(keep, self.block, self.bits, self.scale_bits))


class StochasticRounding(BlockRounding):
    """h~ = Q((D / K) 1_S * h): K keyed channels, each rounded up or down by chance to one of 2^b levels.

    Unbiased in both directions, with other noise backward than forward (streams ACTIVATION_NOISE and
    GRADIENT_NOISE): E[h~] = h to 2^-17 of a step,
        E||h~ - h||^2 = (D / K - 1) ||h||^2 + E sum_S step_i^2 f_i (1 - f_i),  step_i = 2 s_i / (2^b - 1),
    s_i the scale of its block (max |(D / K) h| or up to 2^(8 - scale_bits) of it more), f_i the place of the
    value between its two levels; the sum is at most K step^2 / 4.
    Source: Alistarh et al., "QSGD", NeurIPS 2017, blockwise and on a subset.

    Wire: b K + scale_bits ceil(K / block) bits a token a boundary, each direction, in whole bytes.
    """

    name: Literal["stochastic-rounding"] = "stochastic-rounding"

    @property
    def unbiased(self) -> frozenset[Direction]:
        return frozenset(("forward", "backward"))

    def _draw_slab(self, keys: TokenKeys, boundary: int) -> Tensor:
        """S, then 16-bit noise for the K values forward and as much backward."""
        kept_NK, keep = super()._draw_slab(keys, boundary), self.values_per_token()
        streams = (Stream.ACTIVATION_NOISE, Stream.GRADIENT_NOISE)
        noise = [dither(keys, stream, boundary, keep).to(kept_NK.dtype) for stream in streams]
        return torch.cat((kept_NK, *noise), -1)

    def _offset(self, draw: Tensor, direction: Direction) -> Tensor | float:
        keep = self.values_per_token()
        start = keep if direction == "forward" else 2 * keep
        return uniforms_of(draw[..., start : start + keep])


class RoundToNearest(BlockRounding):
    """h~ = Q((D / K) 1_S * h) with every kept value at its nearest level: the control that should fail.

    The subset S is keyed and unbiased, the rounding is not: the same h always errs the same way, by up to
    half a step, ||h~ - h||^2 = sum_i step_i^2 min(f_i, 1 - f_i)^2 at K = D. With b = 1 a value becomes
    sign(v) max|v| of its block. The gradient is rounded the same way.

    Wire: b K + scale_bits ceil(K / block) bits a token a boundary, each direction, in whole bytes.
    """

    name: Literal["round-to-nearest"] = "round-to-nearest"
