"""Tiles of channels, each turned by a signed Hadamard transform and quantised with its own scale.

Letters: N tokens, D hidden size, K channels sent, G tiles, V channels of a tile, C columns of the draw.
"""

from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, CodecState, Direction
from thinwire.codecs.budget import budget_bits, in_range, refuse_both, too_small
from thinwire.codecs.draws import (
    dither,
    in_slabs,
    kept_channels,
    marked,
    scatter_channels,
    uniforms_of,
    unmarked,
)
from thinwire.codecs.packing import Field, Sent, bytes_per_token
from thinwire.codecs.quantise import block_layout, dequantise_blocks, hadamard, quantise_blocks
from thinwire.core.errors import UserError
from thinwire.core.keys import Stream, TokenKeys, words

LARGEST_TILE = 32


class TileRotated(Codec):
    """h~ = R^T Q(R (D / K) h_S): G tiles of V = 2^n keyed channels, R = H diag(signs) / sqrt(V) in each.

    K = G V. The turn spreads a massive channel over its tile, so one scale fits all V values; signs are
    keyed (stream ROTATION), so no direction is favoured for long. Q is `quantise_blocks` with b bits and one
    scale a tile, in the manner of TAH-Quant (He et al., arXiv 2506.01352), whose allocation of bits by token
    and swapping of pivots are left out: a payload has a fixed size here. The backward pass does the same to
    the gradient with the same S and R and other noise.

    rounding "stochastic": unbiased in both directions,
        E||h~ - h||^2 = (D / K - 1) ||h||^2 + E sum step^2 f (1 - f),  step = 2 s / (2^b - 1),
    over the K turned values (about K step^2 / 6), s the scale of the tile, f the place between two levels.
    "nearest": about K step^2 / 12 for the sum, and a bias that depends on h.

    Wire: G (b V + scale_bits) bits a token a boundary, each direction, in whole bytes: G = 11, V = 32 at
    D = 1536 (1192 bits), G = 4, V = 32 at 576 (432), G = 1, V = 16 at 128 (64) with b = 3.
    Not covered: hidden states above 1e36, whose sums over a tile leave fp32.
    """

    name: Literal["tile-rotated"] = "tile-rotated"
    bits: int = 3
    """b, bits a turned value, 1..8."""
    tile: int | None = None
    """V, channels of a tile: a power of two up to 1024; default the largest up to 32 within the budget."""
    scale_bits: int = 12
    """Bits of a scale, 8..15: 8 of exponent, the others of mantissa."""
    tiles: int | None = None
    """G, tiles per token, 1..floor(D / V); default as many as the budget holds."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How a turned value finds its level: by keyed chance ("stochastic"), or the "nearest"."""
    bits_per_value: float | None = None
    """Budget instead of tiles: the largest G with G (b V + scale_bits) <= bits_per_value D."""

    def at_width(self, hidden_dim: int) -> Self:
        in_range("codec.bits", self.bits, 1, 8)
        in_range("codec.scale_bits", self.scale_bits, 8, 15)
        tile = self._tile_width(hidden_dim)
        tiles = self.tiles
        if tiles is None:
            tiles = self._tiles_within(tile, self.bits_per_value, hidden_dim)
        refuse_both("codec.tiles", self.tiles, self.bits_per_value)
        in_range("codec.tiles", tiles, 1, hidden_dim // tile)
        update = {"hidden_dim": hidden_dim, "tile": tile, "tiles": tiles, "bits_per_value": None}
        return self.model_copy(update=update)

    def _tile_width(self, hidden_dim: int) -> int:
        if self.tile is None:
            budget = budget_bits(self.bits_per_value, hidden_dim)
            widths = [1 << n for n in range(LARGEST_TILE.bit_length()) if 1 << n <= hidden_dim]
            fitting = [width for width in widths if self.tiles or self._bits_of(width, 1) <= budget]
            return max(fitting, default=1)
        widest = min(1024, hidden_dim)
        if self.tile & (self.tile - 1) or not 1 <= self.tile <= widest:
            raise UserError(f"codec.tile must be a power of two in 1..{widest}, got {self.tile}")
        return self.tile

    def _tiles_within(self, tile: int, bits_per_value: float | None, hidden_dim: int) -> int:
        budget = budget_bits(bits_per_value, hidden_dim)
        if self._bits_of(tile, 1) > budget:
            raise too_small(bits_per_value, hidden_dim, self._bits_of(tile, 1))
        return min(budget // (tile * self.bits + self.scale_bits), hidden_dim // tile)

    def _bits_of(self, tile: int, tiles: int) -> int:
        return 8 * bytes_per_token(block_layout(tile * tiles, tile, self.bits, self.scale_bits))

    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        tile, tiles = self._sizes()
        return block_layout(tile * tiles, tile, self.bits, self.scale_bits)

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """S ascending with each channel's sign as its mark, then (stochastic rounding) 16-bit noise for K
        values forward and K backward: (N, C)."""
        tile, tiles = self._sizes()
        keep = tile * tiles

        def slab(keys: TokenKeys) -> Tensor:
            kept_NK = kept_channels(keys, boundary, self.hidden_dim, keep)
            word_NC = words(keys, Stream.ROTATION, boundary, -(-keep // 32))
            place_32 = torch.arange(32, device=word_NC.device)
            flip_NK = ((word_NC[..., None] >> place_32) & 1).flatten(-2)[..., :keep] == 1
            parts = [marked(kept_NK, flip_NK)]
            if self.rounding == "stochastic":
                streams = (Stream.ACTIVATION_NOISE, Stream.GRADIENT_NOISE)
                parts += [dither(keys, stream, boundary, keep).to(kept_NK.dtype) for stream in streams]
            return torch.cat(parts, -1)

        return in_slabs(keys, keep, slab)

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        return self._rounded(hidden_ND, draw, "forward")

    def encode_gradient(self, gradient_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        return self._rounded(gradient_ND, draw, "backward")

    def _rounded(self, values_ND: Tensor, draw: Tensor | None, direction: Direction) -> Sent:
        assert draw is not None
        tile, tiles = self._sizes()
        keep = tile * tiles
        channel_NK, flip_NK = unmarked(draw[..., :keep])
        kept_NK = values_ND.gather(-1, channel_NK).float() * (self.hidden_dim / keep)
        turned_NK = self._turned(_flipped(kept_NK, flip_NK))
        offset: Tensor | float = 0.5
        if self.rounding == "stochastic":
            start = keep if direction == "forward" else 2 * keep
            offset = uniforms_of(draw[..., start : start + keep])
        return quantise_blocks(turned_NK, tile, self.bits, self.scale_bits, offset)

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        assert draw is not None
        tile, tiles = self._sizes()
        channel_NK, flip_NK = unmarked(draw[..., : tile * tiles])
        kept_NK = self._turned(dequantise_blocks(sent, tile, self.bits, self.scale_bits))
        return scatter_channels(_flipped(kept_NK, flip_NK), channel_NK, self.hidden_dim)

    def _turned(self, values_NK: Tensor) -> Tensor:
        """H / sqrt(V) over each tile: its own inverse."""
        tile, tiles = self._sizes()
        return hadamard(values_NK.reshape(*values_NK.shape[:-1], tiles, tile)).reshape(values_NK.shape)

    @property
    def is_linear(self) -> bool:
        return False

    @property
    def unbiased(self) -> frozenset[Direction]:
        return frozenset(("forward", "backward") if self.rounding == "stochastic" else ())

    @property
    def can_change_bits(self) -> bool:
        return True

    def with_bits(self, bits_per_value: float) -> Self:
        tiles = self._tiles_within(self._sizes()[0], bits_per_value, self.hidden_dim)
        return self.model_copy(update={"tiles": tiles})

    def _sizes(self) -> tuple[int, int]:
        assert self.tile is not None
        assert self.tiles is not None
        return self.tile, self.tiles


def _flipped(values_NK: Tensor, flip_NK: Tensor) -> Tensor:
    return torch.where(flip_NK, -values_NK, values_NK)
