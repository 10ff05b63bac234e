"""The parameter gradient through a codec against the dense one, over all weights together."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.core.errors import NonFinite

PIECE = 1 << 22
GRADIENT_KEYS = ("cosine", "relative_error", "norm_ratio", "cosine_of_mean", "relative_error_of_mean")


def compare(gradient: Sequence[Tensor], dense: Sequence[Tensor]) -> tuple[float | None, float, float]:
    """cos(g, g0), |g - g0|^2 / |g0|^2 and |g| / |g0| of two gradients, sums in float64.

    A cosine with a gradient of norm 0 is None; the dense one must not be 0.
    """
    dot = own = base = apart = 0.0
    for a, b in _pieces(gradient, dense):
        dot, own, base = dot + float(a @ b), own + float(a @ a), base + float(b @ b)
        apart += float((a - b).square().sum())
    if not base > 0:
        raise ValueError("the dense gradient is 0")
    return (dot / math.sqrt(own * base) if own > 0 else None), apart / base, math.sqrt(own / base)


def _pieces(gradient: Sequence[Tensor], dense: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in float64, a few million values at a time: an embedding in one piece would take gigabytes."""
    for g, g0 in zip(gradient, dense, strict=True):
        for a, b in zip(torch.split(g.reshape(-1), PIECE), torch.split(g0.reshape(-1), PIECE), strict=True):
            yield a.double(), b.double()


class GradientReading:
    """Readings of several draws' gradients, one at a time: each on its own, and their mean.

    One step of a run takes a single draw, so `cosine` and `relative_error` are means over draws of each
    draw's own reading; `cosine_of_mean` says where many steps on the same tokens would go.
    """

    def __init__(self, dense: Sequence[Tensor]) -> None:
        self._dense = dense
        self._sum: list[Tensor] = []
        self._singles: list[tuple[float | None, float, float]] = []

    def add_(self, gradient: list[Tensor]) -> None:
        """One draw's gradient; it is kept or added up in place. NonFinite where it is not finite."""
        single = compare(gradient, self._dense)
        if not math.isfinite(single[2]):
            raise NonFinite("gradient", single[2])
        self._singles.append(single)
        if self._sum:
            for total, own in zip(self._sum, gradient, strict=True):
                total += own
        else:
            self._sum = gradient

    def finish(self) -> dict[str, float | None]:
        """GRADIENT_KEYS, once, after the last draw; the sums are used up (a copy would be one more model)."""
        cosine, error, ratio = (_mean([single[i] for single in self._singles]) for i in range(3))
        mean, self._sum = self._sum, []
        for total in mean:
            total /= len(self._singles)
        cosine_of_mean, error_of_mean, _ = compare(mean, self._dense)
        values = (cosine, error, ratio, cosine_of_mean, error_of_mean)
        return dict(zip(GRADIENT_KEYS, values, strict=True))


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present else None
