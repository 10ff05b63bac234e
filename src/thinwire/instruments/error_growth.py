"""Accumulated codec error: does the wire throw away the same thing step after step?

At one boundary and step t let e_t = mean over real tokens of (h~ - h), what the codec changed on average.
An error redrawn every step adds up like sqrt(T), one held for good like T (MISSION's sqrt(L T) in between).

Letters: N boundaries, D hidden size, W steps kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

WINDOW = 32
"""Steps the exponent is fitted over, at most."""
MIN_WINDOW = 8
"""Steps it is fitted over, at least."""


@dataclass(frozen=True)
class ErrorGrowth:
    """S_T = sum of e_t over the run (N, D), and the e_t of the last W <= 32 steps (W, N, D), fp32."""

    total_ND: Tensor
    recent_WND: Tensor

    @classmethod
    def at_start(cls, num_boundaries: int, hidden_dim: int) -> "ErrorGrowth":
        return cls(torch.zeros(num_boundaries, hidden_dim), torch.zeros(0, num_boundaries, hidden_dim))

    def after(self, error_ND: Tensor) -> "ErrorGrowth":
        """The same one step later; `error_ND` holds e_t of every boundary."""
        recent_WND = torch.cat([self.recent_WND, error_ND[None]])[-WINDOW:]
        return replace(self, total_ND=self.total_ND + error_ND, recent_WND=recent_WND)

    def series(self) -> dict[str, float]:
        """error_growth/* after the last step; what is undefined (no error at all, too few steps) is absent.

        norm_<b> = |S_T| at boundary b; step_norm = |e_T|, cosine = <e_T, e_{T-1}> / (|e_T| |e_{T-1}|) and
        exponent = `growth_exponent` of the kept steps, each the mean over the boundaries that have one.
        """
        if not len(self.recent_WND):
            return {}
        norms = self.total_ND.norm(dim=-1).tolist()
        series = {f"error_growth/norm_{b}": norm for b, norm in enumerate(norms)}
        last_ND = self.recent_WND[-1]
        series["error_growth/step_norm"] = float(last_ND.norm(dim=-1).mean())
        if len(self.recent_WND) > 1:
            before_ND = self.recent_WND[-2]
            products = (last_ND.norm(dim=-1) * before_ND.norm(dim=-1)).tolist()
            dots = (last_ND * before_ND).sum(-1).tolist()
            cosines = [dot / product for dot, product in zip(dots, products, strict=True) if product > 0]
            if cosines:
                series["error_growth/cosine"] = math.fsum(cosines) / len(cosines)
        exponents = [growth_exponent(error_WD) for error_WD in self.recent_WND.unbind(1)]
        found = [exponent for exponent in exponents if exponent is not None]
        if found:
            series["error_growth/exponent"] = math.fsum(found) / len(found)
        return series


def growth_exponent(error_WD: Tensor) -> float | None:
    """H of |S_{s+l} - S_s| ~ l^H, S the running sum of W successive errors; None below 8 or where all are 0.

    H = half the OLS slope of log m(l) on log l over lags l = 1, 2, 4, ..., <= W / 2, with
    m(l) = mean over s of |S_{s+l} - S_s|^2, the mean square displacement over all windows of l steps. For
    independent errors of mean 0 E m(l) = l E|e|^2, so H = 1/2; for one and the same error m(l) = l^2 |e|^2,
    so H = 1; alternating signs give less than 1/2. (The exponent of anomalous diffusion, or Hurst's.)
    """
    num_steps = len(error_WD)
    if num_steps < MIN_WINDOW:
        return None
    lags = octaves(num_steps)
    squares = displacements(error_WD, lags)
    if min(squares) <= 0:
        return None
    return float(np.polyfit(np.log(lags), np.log(squares), 1)[0]) / 2


def octaves(num_steps: int) -> list[int]:
    """Lags 1, 2, 4, ..., <= W / 2: each has at least W / 2 + 1 windows."""
    return [2**i for i in range(int(math.log2(num_steps / 2)) + 1)]


def displacements(error_WD: Tensor, lags: Sequence[int]) -> list[float]:
    """m(l) = mean over s of |S_{s+l} - S_s|^2 at every lag l, S the running sum of W errors, float64."""
    walk_WD = torch.cat([torch.zeros_like(error_WD[:1]), error_WD]).double().cumsum(0)
    return [float((walk_WD[lag:] - walk_WD[:-lag]).square().sum(-1).mean()) for lag in lags]
