"""What a codec changes at each boundary: relative error and bias, forward on h and backward on dL/dh.

Each boundary is read on its own, on the dense model's hidden states and gradients: errors do not pile up here
as they do in a pass. Letters: B rows, T positions, N real tokens, D hidden size, n draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.passes import Dense, add_moments
from thinwire.codecs import Codec, CodecState, Moments, View
from thinwire.codecs.base import Direction
from thinwire.codecs.waterfill import reverse_water_filling
from thinwire.core.errors import UserError

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
ERROR_KEYS = ("relative_error", "squared_bias", "bias_standard_error", "relative_error_token_mean")


@dataclass
class _Sums:
    """Sums over tokens in float64: |x|^2; mean over draws of |e|^2; of <e_i, e_j> over pairs of different
    draws, and its square; of |e|^2 / |x|^2."""

    num_draws: int
    norm: float = 0.0
    error: float = 0.0
    bias: float = 0.0
    bias_square: float = 0.0
    ratio: float = 0.0
    num_tokens: int = 0

    def add_(self, value_ND: Tensor, errors_nND: Tensor) -> None:
        n = self.num_draws
        norm_N = value_ND.double().square().sum(-1)
        total_N = errors_nND.double().square().sum((0, 2))
        error_N = total_N / n
        bias_N = error_N  # nothing is drawn: the error is the same at every step
        if n > 1:
            bias_N = (errors_nND.double().sum(0).square().sum(-1) - total_N) / (n * (n - 1))
            self.bias_square += float(bias_N.square().sum())
        present_N = norm_N > 0  # a gradient is 0 after the last token that a loss sees
        self.norm += float(norm_N.sum())
        self.error += float(error_N.sum())
        self.bias += float(bias_N.sum())
        self.ratio += float((error_N[present_N] / norm_N[present_N]).sum())
        self.num_tokens += int(present_N.sum())

    def reading(self) -> dict[str, float | None]:
        """ERROR_KEYS; see `boundary_errors`. None where nothing but zeros crossed, or it is not finite."""
        if not self.norm:
            return dict.fromkeys(ERROR_KEYS)
        parts = (self.error, self.bias, math.sqrt(self.bias_square))
        values = (*(part / self.norm for part in parts), self.ratio / self.num_tokens)
        finite = (value if math.isfinite(value) else None for value in values)
        return dict(zip(ERROR_KEYS, finite, strict=True))


def boundary_errors(views: Sequence[View], passes: Sequence[Dense]) -> list[dict[str, dict[str, Any]]]:
    """A reading for every boundary and direction, over all real tokens and the views' draws e = x~ - x.

    relative_error = sum |e|^2 / sum |x|^2, mean over draws: tokens of large norm dominate it;
    relative_error_token_mean = mean over tokens of |e|^2 / |x|^2: every token alike;
    squared_bias = sum |E e|^2 / sum |x|^2, the part of relative_error that no redraw averages away. The mean
    of <e_i, e_j> over pairs of different draws estimates it without the noise floor of |mean of n draws|^2
    (about relative_error / n), so noise may put it below 0: bias_standard_error says how far (tokens of
    independent draws assumed). A codec that draws nothing has one error for good: squared_bias =
    relative_error, standard error 0.
    """
    codec, states = views[0].codec, views[0].states
    sums = [{direction: _Sums(len(views)) for direction in DIRECTIONS} for _ in states]
    for dense in passes:
        mask_BT = dense.batch.token_mask_BT
        for b, state in enumerate(states):
            draws = [view.draw(b, dense.batch.sample_B, mask_BT.shape[1]) for view in views]
            for direction, values in zip(DIRECTIONS, (dense.hidden, dense.gradient), strict=True):
                value_BTD = values[b]
                value_ND = value_BTD[mask_BT].float()
                decoded = [sent_over(codec, value_BTD, draw, state, direction) for draw in draws]
                errors_nND = torch.stack([one[mask_BT].float() - value_ND for one in decoded])
                sums[b][direction].add_(value_ND, errors_nND)
    return [{direction: one.reading() for direction, one in both.items()} for both in sums]


def sent_over(
    codec: Codec, value: Tensor, draw: Tensor | None, state: CodecState, direction: Direction
) -> Tensor:
    """What the other end reads, in the type of the values."""
    if direction == "forward":
        return codec.decode(codec.encode(value, draw, state), draw, state).to(value.dtype)
    sent = codec.encode_gradient(value, draw, state)
    return codec.decode_gradient(sent, draw, state).to(value.dtype)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues (D,) of the centred covariance of one boundary and direction, and the mean of |x|^2."""

    eigenvalues_D: Tensor
    mean_square: float

    def reference(self, bits: float) -> float | None:
        """The Gaussian reference: relative error of a Gaussian of this covariance at its rate-distortion
        limit of `bits` a token, mean known. Codes of data that are not Gaussian may have less."""
        if not self.mean_square:
            return None
        return reverse_water_filling(self.eigenvalues_D, bits).distortion / self.mean_square


def spectra(passes: Sequence[Dense]) -> list[dict[str, Spectrum]]:
    """The spectrum of every boundary and direction, of the scored tokens themselves."""
    found = []
    for b in range(len(passes[0].hidden)):
        both: dict[str, Spectrum] = {}
        for direction in DIRECTIONS:
            moments: Moments | None = None
            for dense in passes:
                value_BTD = (dense.hidden if direction == "forward" else dense.gradient)[b]
                moments = add_moments(moments, value_BTD[dense.batch.token_mask_BT])
            assert moments is not None
            refuse_non_finite(moments, b, direction)
            both[direction] = _spectrum(moments)
        found.append(both)
    return found


def refuse_non_finite(moments: Moments, boundary: int, direction: Direction) -> None:
    """UserError that names the boundary whose covariance holds nan or inf."""
    if not bool(torch.isfinite(moments.second_DD).all() and torch.isfinite(moments.sum_D).all()):
        raise UserError(
            f"boundary/{boundary}/{direction}: the covariance holds values that are not finite; "
            "take --model.dtype float32, or weights that do not overflow"
        )


def _spectrum(moments: Moments) -> Spectrum:
    second_DD = moments.second_DD.double().cpu() / moments.num_tokens
    mean_D = moments.sum_D.double().cpu() / moments.num_tokens
    eigenvalues_D = torch.linalg.eigvalsh(second_DD - mean_D[:, None] * mean_D[None])
    return Spectrum(eigenvalues_D, float(second_DD.trace()))
