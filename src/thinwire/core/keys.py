"""Randomness as a pure function of explicit keys, bit-identical on every device.

Every random number of a run is `Philox4x32-10(counter, key)` (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) of the tuple

    (seed, stream, boundary, step, sample, position, channel)

so both ends of a wire, every pass of a step, a recomputed block, another batching and a resumed run
see the same draw without a byte of it being sent. The arithmetic is plain int64 on words below 2^32.

Letters in shape suffixes: `N` any leading shape (tokens, rows), `C` channels or draws.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


class Stream(IntEnum):
    """What a draw is for: two streams never share a number."""

    ACTIVATION_MASK = 0
    ACTIVATION_NOISE = 1
    GRADIENT_NOISE = 2
    ROTATION = 3
    SAMPLER = 4
    TASK = 5
    BASIS = 6


@dataclass(frozen=True)
class TokenKeys:
    """The part of a key that differs from token to token, and the run's seed and step.

    `sample_N` and `position_N` are int64 of one shape (they broadcast): sample = prompt index x group
    size + member within the step, position counts from the first real token of the row.
    """

    seed: int
    step: int
    sample_N: Tensor
    position_N: Tensor


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words in [0, 2^32) for each counter: Philox4x32 with 10 rounds.

    `counter` holds four int64 tensors of one shape with values in [0, 2^32). A product of two such
    words wraps in int64 to the same 64 bits as the unsigned product, so its high and low words are exact.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _MASK32) ^ c1 ^ k0,
            product_1 & _MASK32,
            ((product_0 >> 32) & _MASK32) ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def words(keys: TokenKeys, stream: Stream, boundary: int, num: int) -> Tensor:
    """`num` words in [0, 2^32) for every token, int64 of shape (*N, num).

    Word c of a token depends on (seed, stream, boundary, step, sample, position, c) and on nothing else:
    philox counter (c // 4, position, sample, step), key (seed, stream * 2^16 + boundary), lane c % 4.
    """
    _check_scalar("seed", keys.seed, 1 << 32)
    _check_scalar("step", keys.step, 1 << 32)
    _check_scalar("boundary", boundary, 1 << 16)
    shape = torch.broadcast_shapes(keys.sample_N.shape, keys.position_N.shape)  # type: ignore[no-untyped-call]
    num_blocks = (num + 3) // 4
    device = keys.sample_N.device
    block_C = torch.arange(num_blocks, dtype=torch.int64, device=device)
    counter = (
        block_C.expand(*shape, num_blocks),
        keys.position_N.expand(shape).unsqueeze(-1),
        keys.sample_N.expand(shape).unsqueeze(-1),
        torch.tensor(keys.step, device=device),
    )
    lanes = philox4x32(counter, (keys.seed, (stream << 16) | boundary))
    return torch.stack(lanes, dim=-1).flatten(-2)[..., :num]


def uniforms(keys: TokenKeys, stream: Stream, boundary: int, num: int) -> Tensor:
    """`num` float64 numbers in [0, 1) for every token, multiples of 2^-32, shape (*N, num)."""
    return words(keys, stream, boundary, num).to(torch.float64) * 2.0**-32


def normals(keys: TokenKeys, stream: Stream, boundary: int, num: int) -> Tensor:
    """`num` float64 standard normal numbers for every token (Box-Muller on keyed uniforms).

    Not covered: bit-identity across devices (log and cos differ in the last bit between libraries);
    what must agree everywhere is drawn from `words`, or computed at one end and sent.
    """
    uniform_NC = uniforms(keys, stream, boundary, 2 * num)
    radius_NC = torch.sqrt(-2.0 * torch.log1p(-uniform_NC[..., :num]))
    return radius_NC * torch.cos(2.0 * torch.pi * uniform_NC[..., num:])


def permutation_prefix(keys: TokenKeys, stream: Stream, boundary: int, size: int, num: int) -> Tensor:
    """The first `num` entries of a keyed uniform permutation of range(size) per token, int64 (*N, num).

    Fisher-Yates: entry j swaps with entry j + floor(w_j (size - j) / 2^32), w_j the j-th keyed word, so
    `num` draws suffice, no two entries are equal, and num = size gives the whole permutation. The
    multiply-shift leaves a relative bias of at most size / 2^32 on an entry.
    """
    if not 0 <= num <= size:
        raise ValueError(f"a permutation of {size} entries has no prefix of {num}")
    word_NC = words(keys, stream, boundary, num)
    shape = word_NC.shape
    word_NC = word_NC.reshape(math.prod(shape[:-1]), num)
    entries = torch.arange(size, dtype=torch.int16 if size < 1 << 15 else torch.int64)
    pool_NC = entries.to(word_NC.device).repeat(word_NC.shape[0], 1)
    for j in range(num):
        swap_N1 = j + ((word_NC[:, j : j + 1] * (size - j)) >> 32)
        chosen_N1 = pool_NC.gather(1, swap_N1)
        pool_NC.scatter_(1, swap_N1, pool_NC[:, j : j + 1].clone())
        pool_NC[:, j : j + 1] = chosen_N1
    return pool_NC[:, :num].to(torch.int64).reshape(shape)


def scalar_keys(seed: int, step: int, sample: int = 0, position: int = 0) -> TokenKeys:
    """Keys of one draw that belongs to no token (a shuffle, a starting basis): shape ()."""
    return TokenKeys(seed, step, torch.tensor(sample), torch.tensor(position))


def _check_scalar(name: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise ValueError(f"{name} must be in 0..{limit - 1}, got {value}")
