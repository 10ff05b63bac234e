"""Keyed draws that several codecs share, small enough to be kept for a whole step.

A draw is one integer tensor whose first dimensions are the tokens'. Letters: N tokens, D hidden size, K
channels kept, C columns of a draw.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.core.keys import Stream, TokenKeys, permutation_prefix, words

_SLAB_WORDS = 1 << 23


def in_slabs(keys: TokenKeys, words_per_token: int, make: Callable[[TokenKeys], Tensor]) -> Tensor:
    """`make` over slabs of tokens, joined: the same values, with bounded memory for int64 intermediates.

    A keyed word takes 8 bytes and philox holds about four times that, more than the activation itself where
    a codec draws for most channels; a slab of 2^23 words bounds it by a constant.
    """
    sample_N, position_N = torch.broadcast_tensors(keys.sample_N, keys.position_N)  # type: ignore[no-untyped-call]
    size = max(1, _SLAB_WORDS // max(1, words_per_token))
    slabs = zip(sample_N.reshape(-1).split(size), position_N.reshape(-1).split(size), strict=True)
    parts = [make(TokenKeys(keys.seed, keys.step, sample, position)) for sample, position in slabs]
    return torch.cat(parts).reshape(*sample_N.shape, parts[0].shape[-1])


def index_dtype(hidden_dim: int) -> torch.dtype:
    """int16 where it holds every channel and its complement ~channel, else int32."""
    return torch.int16 if hidden_dim <= 1 << 15 else torch.int32


def permuted_channels(keys: TokenKeys, boundary: int, hidden_dim: int, num: int) -> Tensor:
    """The first `num` entries of a keyed permutation of the channels per token: (N, num), no two equal."""
    chosen_NK = permutation_prefix(keys, Stream.ACTIVATION_MASK, boundary, hidden_dim, num)
    return chosen_NK.to(index_dtype(hidden_dim))


def kept_channels(keys: TokenKeys, boundary: int, hidden_dim: int, num: int) -> Tensor:
    """A keyed uniform K-subset of the channels per token, ascending (N, K).

    Ascending, so that blocks of a whole hidden state (K = D) are blocks of neighbours, as is usual.
    """
    if num == hidden_dim:
        shape = torch.broadcast_shapes(keys.sample_N.shape, keys.position_N.shape)  # type: ignore[no-untyped-call]
        every_D = torch.arange(hidden_dim, device=keys.sample_N.device, dtype=index_dtype(hidden_dim))
        return every_D.repeat(*shape, 1)
    return permuted_channels(keys, boundary, hidden_dim, num).sort(-1).values


def dither(keys: TokenKeys, stream: Stream, boundary: int, num: int) -> Tensor:
    """`num` 16-bit numbers per token, two out of each keyed word, int16 (N, num): see `uniforms_of`."""
    word_NC = words(keys, stream, boundary, (num + 1) // 2)
    halves_NC = torch.stack((word_NC & 0xFFFF, word_NC >> 16), -1).flatten(-2)[..., :num]
    return (halves_NC - (1 << 15)).to(torch.int16)


def uniforms_of(dither_NC: Tensor) -> Tensor:
    """fp32 in (0, 1), symmetric about 1/2: (u + 1/2) / 2^16; rounding by it is biased by at most 2^-17."""
    return (dither_NC.float() + (0.5 + (1 << 15))) * 2.0**-16


def marked(channels_NK: Tensor, mark_NK: Tensor) -> Tensor:
    """Channels with one bit each, in the sign: c where unmarked, ~c = -1 - c where marked."""
    return torch.where(mark_NK, ~channels_NK, channels_NK)


def unmarked(marked_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The channels (int64, for gather and scatter) and their marks out of `marked`."""
    mark_NK = marked_NK < 0
    return torch.where(mark_NK, ~marked_NK, marked_NK).long(), mark_NK


def scatter_channels(values_NK: Tensor, channels_NK: Tensor, hidden_dim: int) -> Tensor:
    """(N, D) with the values at their channels and zero elsewhere, at least fp32."""
    shape = (*values_NK.shape[:-1], hidden_dim)
    wide = torch.promote_types(values_NK.dtype, torch.float32)
    decoded_ND = torch.zeros(shape, dtype=wide, device=values_NK.device)
    return decoded_ND.scatter_(-1, channels_NK.long(), values_NK.to(wide))
