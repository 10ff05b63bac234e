"""Blockwise quantisation: b-bit codes on a symmetric grid, one scale a block, and the Hadamard transform.

Letters: N tokens, V values of a token, S scales of a token (one a block of values).
"""

import torch
from torch import Tensor

from thinwire.codecs.packing import Field, Sent, codes

_FP32_BITS = 31  # without the sign: a scale is not negative
_INFINITY, _SMALLEST_NORMAL = 0x7F800000, 0x00800000


def coded_scale(absmax_NS: Tensor, bits: int) -> Tensor:
    """The leading `bits` (8..15) of fp32 without its sign, rounded up, so that no value exceeds its scale.

    8 bits are a power of two (up to 2 times max|v|), each further bit halves the excess; 15 bits are bf16.
    The whole range of fp32 is kept: zero is code 0, what is subnormal takes the smallest normal number,
    what would round to infinity takes the largest code.
    """
    dropped = _FP32_BITS - bits
    raw_NS = absmax_NS.float().contiguous().view(torch.int32)
    code_NS = (raw_NS + ((1 << dropped) - 1)) >> dropped
    low = torch.where(raw_NS > 0, _SMALLEST_NORMAL >> dropped, 0)
    return torch.clamp(code_NS, max=(_INFINITY >> dropped) - 1).maximum(low.to(torch.int32))


def scale_of(code_NS: Tensor, bits: int) -> Tensor:
    """fp32 scales out of `coded_scale`'s codes."""
    return (code_NS << (_FP32_BITS - bits)).view(torch.float32)


def block_layout(num: int, block: int, bits: int, scale_bits: int) -> tuple[Field, ...]:
    """Scales, then codes: ceil(num / block) scale_bits + num bits, all in one bit stream."""
    return codes(-(-num // block), scale_bits), codes(num, bits)


def quantise_blocks(
    values_NV: Tensor, block: int, bits: int, scale_bits: int, offset: Tensor | float
) -> Sent:
    """Scale codes and value codes: c = floor((v / s + 1) (2^b - 1) / 2 + offset), s >= max|v| of the block.

    The grid is s (2 c / (2^b - 1) - 1), 2^b levels from -s to s with step 2 s / (2^b - 1) and no zero. Offset
    1/2 rounds to the nearest level; an offset uniform in (0, 1) rounds stochastically, E[level] = v, variance
    step^2 f (1 - f) with f the place of v between its two levels. A block of zeros has scale 0 and stays 0.
    """
    num, top = values_NV.shape[-1], (1 << bits) - 1
    num_blocks = -(-num // block)
    padded_NV = torch.nn.functional.pad(values_NV.abs(), (0, num_blocks * block - num))
    absmax_NS = padded_NV.reshape(*values_NV.shape[:-1], num_blocks, block).amax(-1)
    scale_codes_NS = coded_scale(absmax_NS, scale_bits)
    scale_NS = scale_of(scale_codes_NS, scale_bits)
    divisor_NV = _spread(torch.where(scale_NS > 0, scale_NS, 1.0), block, num)
    place_NV = (values_NV / divisor_NV + 1.0) * (top / 2)
    return scale_codes_NS, (place_NV + offset).floor().clamp(0, top).to(torch.int32)


def dequantise_blocks(sent: Sent, block: int, bits: int, scale_bits: int) -> Tensor:
    """The grid values (N, V) of what `quantise_blocks` gave."""
    scale_codes_NS, codes_NV = sent
    scale_NV = _spread(scale_of(scale_codes_NS, scale_bits), block, codes_NV.shape[-1])
    top = (1 << bits) - 1
    return (2 * codes_NV - top) / top * scale_NV


def hadamard(values_NV: Tensor) -> Tensor:
    """H v / sqrt(V), H the Hadamard matrix of Sylvester's order, V a power of two: its own inverse.

    log2(V) stages of sums and differences: elementwise, so a token's bits do not depend on its neighbours.
    """
    shape, num = values_NV.shape, values_NV.shape[-1]
    assert num & (num - 1) == 0, num
    half = 1
    while half < num:
        upper, lower = values_NV.reshape(*shape[:-1], num // (2 * half), 2, half).unbind(-2)
        values_NV = torch.stack((upper + lower, upper - lower), -2).reshape(shape)
        half *= 2
    return values_NV * float(num**-0.5)


def _spread(scale_NS: Tensor, block: int, num: int) -> Tensor:
    return scale_NS.repeat_interleave(block, -1)[..., :num]
