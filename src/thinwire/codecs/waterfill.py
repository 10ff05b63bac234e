"""The rate-distortion curve of a Gaussian vector: which directions get bits, and what error is left.

Letters: D directions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class WaterFilling(NamedTuple):
    """Least squared error (the sum over directions), bits of each direction, and the water level."""

    distortion: float
    bits_D: Tensor
    level: float


def reverse_water_filling(eigenvalues_D: Tensor, bits: float) -> WaterFilling:
    """The optimum of sum_i min(l_i, w) under sum_i b_i = bits, b_i = max(0, log2(l_i / w) / 2), in float64.

    Exact, by sorting: with the m largest eigenvalues above the level, log2 w = (sum of their log2 l - 2 bits)
    / m, and m is the largest number whose smallest eigenvalue lies above its level. bits 0 puts the level at
    the largest eigenvalue. Eigenvalues of 0 (or below it by rounding) take no bits and leave no error.
    For data that are not Gaussian the distortion is an upper bound on what a code of that rate can reach
    (the Gaussian is the hardest of its covariance), not a lower one.
    """
    if not bits >= 0:
        raise ValueError(f"a rate is 0 bits or more, got {bits}")
    value_D = eigenvalues_D.detach().double().cpu().clamp(min=0.0)
    if not bool(torch.isfinite(value_D).all()):
        raise ValueError("eigenvalues must be finite")
    log_M = value_D[value_D > 0].log2().sort(descending=True).values
    if not len(log_M):
        return WaterFilling(0.0, torch.zeros_like(value_D), 0.0)
    count_M = torch.arange(1, len(log_M) + 1, dtype=torch.float64)
    level_M = (log_M.cumsum(0) - 2 * bits) / count_M
    num_above = int((log_M > level_M).sum()) or 1
    log_level = float(level_M[num_above - 1])
    bits_D = (0.5 * (value_D.log2() - log_level)).clamp(min=0.0)
    level = math.exp2(log_level)
    return WaterFilling(float(value_D.clamp(max=level).sum()), bits_D, level)
