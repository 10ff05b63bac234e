"""Transform coding at a fixed rate: whole bits by direction, Lloyd-Max levels, one gain a token.

Letters: N tokens, D hidden size, M directions of a transform, W 32-bit words of keyed signs.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct
from scipy.optimize import root
from scipy.stats import norm
from torch import Tensor

from thinwire.codecs.packing import Field, Sent, codes
from thinwire.core.keys import Stream, TokenKeys, words

MAX_BITS = 8
GAIN_BITS = 8
_OCTAVE = 8
"""Gain codes an octave: 255 steps of 9%, from 2^-16 to 2^16 times the learned level."""


@lru_cache
def lloyd_max(bits: int) -> tuple[NDArray[np.float64], float]:
    """The 2^bits levels of least mean squared error for a unit normal value, and that error.

    The root of level = E[x | cell], cells cut at the midpoints of levels (float64, from the quantiles of the
    density's cube root, the limit for many levels), residual below 1e-9.
    Source: Max, "Quantizing for minimum distortion", 1960; Lloyd, 1957 (published 1982).
    """
    num = 1 << bits
    found = root(_centroid_shift, norm.ppf((np.arange(num) + 0.5) / num) * 3**0.5, tol=1e-14)
    levels = (found.x - found.x[::-1]) / 2  # exactly symmetric
    assert np.abs(_centroid_shift(levels)).max() < 1e-9
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    return levels, float(1.0 - (np.diff(norm.cdf(edges)) * levels**2).sum())


def _centroid_shift(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """E[x | cell] - level."""
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    density = norm.pdf(edges)
    shift: NDArray[np.float64] = (density[:-1] - density[1:]) / np.diff(norm.cdf(edges)) - levels
    return shift


@lru_cache
def distortions() -> tuple[float, ...]:
    """Error of a unit normal value at 0, 1, ..., MAX_BITS bits."""
    return (1.0, *(lloyd_max(bits)[1] for bits in range(1, MAX_BITS + 1)))


def allocate_bits(variance_M: Sequence[float], num_bits: int) -> list[int]:
    """Whole bits of each direction, each next bit to where it lowers sum_i variance_i error(b_i) most.

    Optimal for a convex error(b), and the integer form of reverse water-filling. The bits add up to
    `num_bits`, or to MAX_BITS a direction where that is less. `variance_M` must not increase.
    Source: Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988.
    """
    error = distortions()
    bits_M = [0] * len(variance_M)
    heap = [(-variance * (error[0] - error[1]), at) for at, variance in enumerate(variance_M)]
    heapq.heapify(heap)
    for _ in range(min(num_bits, MAX_BITS * len(bits_M))):
        _, at = heapq.heappop(heap)
        bits_M[at] += 1
        bits = bits_M[at]
        if bits < MAX_BITS:
            heapq.heappush(heap, (-variance_M[at] * (error[bits] - error[bits + 1]), at))
    return sorted(bits_M, reverse=True)


@dataclass(frozen=True)
class Transform:
    """One direction of a boundary: y = x E, x~ = y~ F, and what is known of y.

    `encode_DM` is used by the sender alone; `decode_MD`, `spread_M` (standard deviations of y) and `bits_M`
    (not increasing) by both ends.
    """

    encode_DM: Tensor
    decode_MD: Tensor
    spread_M: Tensor
    bits_M: Tensor

    def groups(self) -> list[tuple[int, slice]]:
        """(bits, directions) of every run of directions with the same bits, those without left out."""
        found: list[tuple[int, slice]] = []
        bits_M = self.bits_M.tolist()
        for bits in sorted({*bits_M} - {0}, reverse=True):
            first = bits_M.index(bits)
            found.append((bits, slice(first, first + bits_M.count(bits))))
        return found

    def fields(self, num_bits: int) -> tuple[Field, ...]:
        """The gain, then the codes of every group; what is left of the budget is a field of single bits."""
        groups = self.groups()
        spare = num_bits - GAIN_BITS - sum(bits * (at.stop - at.start) for bits, at in groups)
        rest = (codes(spare, 1),) if spare else ()
        return (codes(1, GAIN_BITS), *(codes(at.stop - at.start, bits) for bits, at in groups), *rest)


def encode(x_ND: Tensor, transform: Transform, signs_NM: Tensor, num_bits: int) -> Sent:
    """Gain code and level codes of x.

    w = y / spread has unit variance on average; the token's own gain is s = rms(w) over the directions that
    have bits. Each group of n directions is scaled by spread / (rms of the group's spreads), its signs are
    flipped by key, and an orthonormal DCT of length n mixes it: its coordinates are then close to normal
    of deviation s whatever the token, and the error of a token points elsewhere at every step.
    """
    white_NM = x_ND @ transform.encode_DM / transform.spread_M
    groups = transform.groups()
    used = max((at.stop for _, at in groups), default=0)
    gain_N1 = white_NM[..., :used].square().mean(-1, keepdim=True).sqrt()
    gain_code_N1 = _gain_code(gain_N1)
    gain_N1 = _gain_of(gain_code_N1)
    divisor_N1 = torch.where(gain_N1 > 0, gain_N1, 1.0)
    sent = [gain_code_N1]
    for bits, at in groups:
        mixed_NG = (white_NM[..., at] * _relative(transform.spread_M[at]) * signs_NM[..., at]) @ _dct(
            at.stop - at.start, x_ND.device
        )
        edges, _ = _levels(bits, x_ND.device)
        sent.append(torch.bucketize((mixed_NG / divisor_N1).contiguous(), edges, out_int32=True))
    spare = transform.fields(num_bits)[len(sent) :]
    return (*sent, *(gain_code_N1.new_zeros((*gain_code_N1.shape[:-1], field.num)) for field in spare))


def decode(sent: Sent, transform: Transform, signs_NM: Tensor) -> Tensor:
    """x~ (N, D), fp32."""
    gain_N1 = _gain_of(sent[0])
    num_directions = transform.decode_MD.shape[0]
    y_NM = signs_NM.new_zeros((*gain_N1.shape[:-1], num_directions))
    for (bits, at), code_NG in zip(transform.groups(), sent[1:], strict=False):
        _, levels = _levels(bits, code_NG.device)
        mixed_NG = levels[code_NG] @ _dct(at.stop - at.start, code_NG.device).T
        rms = transform.spread_M[at].square().mean().sqrt()
        y_NM[..., at] = mixed_NG * signs_NM[..., at] * (gain_N1 * rms)
    return y_NM @ transform.decode_MD.float()


def num_words(num_signs: int) -> int:
    """Words that hold `num_signs` signs."""
    return -(-num_signs // 32)


def keyed_signs(keys: TokenKeys, boundary: int, num: int) -> Tensor:
    """`num` fair signs a token, 32 in each keyed word: int32 (N, W)."""
    word_NW = words(keys, Stream.ROTATION, boundary, num_words(num))
    return (word_NW - (1 << 31)).to(torch.int32)


def signs_of(word_NW: Tensor, first: int, num: int) -> Tensor:
    """Signs first .. first + num of `keyed_signs`, fp32 of +1 and -1 (N, num)."""
    place_C = torch.arange(first, first + num, device=word_NW.device)
    taken_NC = word_NW[..., place_C // 32]
    return 1.0 - 2.0 * ((taken_NC >> (place_C % 32).to(torch.int32)) & 1).float()


def _gain_code(gain_N1: Tensor) -> Tensor:
    """1 + round(8 log2 s) + 128, clamped to 1..255; 0 for a gain of 0."""
    place_N1 = (gain_N1.clamp(min=torch.finfo(torch.float32).tiny).log2() * _OCTAVE).round() + 128
    top = (1 << GAIN_BITS) - 1
    return torch.where(gain_N1 > 0, place_N1.clamp(1, top), 0.0).to(torch.int32)


def _gain_of(code_N1: Tensor) -> Tensor:
    gain_N1 = torch.exp2((code_N1 - 128).float() / _OCTAVE)
    return torch.where(code_N1 > 0, gain_N1, 0.0)


def _relative(spread_G: Tensor) -> Tensor:
    return spread_G / spread_G.square().mean().sqrt()


@lru_cache(maxsize=256)
def _dct(num: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II of length `num` as a matrix for row vectors."""
    return torch.from_numpy(dct(np.eye(num), norm="ortho", axis=1)).float().to(device)


@lru_cache(maxsize=64)
def _levels(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Decision edges and levels, fp32."""
    levels, _ = lloyd_max(bits)
    edges = (levels[1:] + levels[:-1]) / 2
    return torch.from_numpy(edges).float().to(device), torch.from_numpy(levels).float().to(device)


def white_directions(second_DD: Tensor, weight_DD: Tensor | None, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `num` leading directions of a covariance C under an error weight W: (encode, decode, variances).

    W^1/2 C W^1/2 = V diag(l) V^T; encode = W^1/2 V, decode = V^T W^-1/2: y = x encode is uncorrelated, and
    the error of x~ = y~ decode, weighted by W, is that of y~. Without W the Karhunen-Loeve transform. All in
    float64.
    """
    root_DD = inverse_DD = None
    if weight_DD is not None:
        value_D, vector_DD = torch.linalg.eigh(weight_DD)
        value_D = value_D.clamp(min=1e-9 * float(value_D[-1].clamp(min=math.ulp(0.0))))
        root_DD = (vector_DD * value_D.sqrt()) @ vector_DD.T
        inverse_DD = (vector_DD * value_D.rsqrt()) @ vector_DD.T
        second_DD = root_DD @ second_DD @ root_DD
    variance_D, vector_DD = torch.linalg.eigh((second_DD + second_DD.T) / 2)
    variance_M, vector_DM = variance_D.flip(0)[:num].clamp(min=0.0), vector_DD.flip(1)[:, :num]
    if root_DD is None or inverse_DD is None:
        return vector_DM, vector_DM.T, variance_M
    return root_DD @ vector_DM, vector_DM.T @ inverse_DD, variance_M
