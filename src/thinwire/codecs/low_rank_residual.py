"""A learned low-rank part, and a random mask over what it leaves.

Letters: N tokens, D hidden size, R subspace dimension, K channels of the residual, V = R + K values sent.
"""

from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, Codec, CodecState, Direction, Moments
from thinwire.codecs.budget import in_range, in_width, refuse_both, resolve_kept
from thinwire.codecs.draws import permuted_channels, scatter_channels
from thinwire.codecs.packing import Field, Sent, floats, saturated
from thinwire.codecs.subspace import next_basis, starting_basis
from thinwire.core.errors import UserError
from thinwire.core.keys import TokenKeys


class LowRankResidual(Codec):
    """h~ = P h + c 1_S * (I - P) h, P = Q Q^T learned by an anchor, |S| = K keyed, c = D / K or 1.

    r = (I - P) h. residual "unbiased", c = D / K: E[h~] = h, E||h~ - h||^2 = (D / K - 1) ||r||^2, less than
    exact-k at V values where ||r||^2 < (D / V - 1) / (D / K - 1) ||h||^2 (35% at 48 + 28 of 1536).
    "biased", c = 1: E[h~] = P h + (K / D) r, E||h~ - h||^2 = (1 - K / D) ||r||^2.
    The backward pass is the adjoint P + c (I - P) M, M = diag(1_S): it masks the whole gradient before it
    projects, so with c = D / K its error
        E||g~ - g||^2 = (D / K - 1) / (D - 1) (D sum_i (1 - P_ii) g_i^2 - ||(I - P) g||^2)
    grows with ||g||, not with what the basis leaves of g. `symmetric` also projects the decoded residual,
    P + c (I - P) M (I - P): its own adjoint, unbiased as well; both directions then have the error above with
    (I - P) g for g. What rounding the R coefficients leaves is part of the forward residual.
    Source: the low-rank part is Vogels et al., "PowerSGD", NeurIPS 2019.

    Wire: 16 (R + K) bits a token a boundary, each direction; side channel 32 D R bits a boundary a fire.
    Default: 48 / 77 and 28 / 77 of exact-k's values: 48 + 28 of 77 at D = 1536, 18 + 10 of 29 at 576.
    """

    name: Literal["low-rank-residual"] = "low-rank-residual"
    subspace_dim: int | None = None
    """R, 0..D; default 48 / 77 of the values in the budget (0 where the budget is one value)."""
    keep: int | None = None
    """K, channels of the residual, 1..D; default 28 / 77 of the values, or what subspace_dim leaves."""
    bits_per_value: float | None = None
    """Budget: R + K <= floor(bits_per_value D / 16); default round(0.05 D) values."""
    residual: Literal["unbiased", "biased"] = "unbiased"
    """The residual's values times D / K ("unbiased"), or as they are ("biased")."""
    symmetric: bool = False
    """Project the decoded residual off the basis as well: less noise, one more product."""
    power_iterations: int = 2
    """Power iterations an anchor fire, each Q <- qr(C Q), started from the basis of the last fire."""

    def at_width(self, hidden_dim: int) -> Self:
        subspace_dim, keep = self._split(hidden_dim)
        in_width("codec.subspace_dim", subspace_dim, hidden_dim, low=0)
        in_width("codec.keep", keep, hidden_dim)
        in_range("codec.power_iterations", self.power_iterations, 1, 1000)
        update = {"hidden_dim": hidden_dim, "subspace_dim": subspace_dim, "keep": keep}
        return self.model_copy(update={**update, "bits_per_value": None})

    def _split(self, hidden_dim: int) -> tuple[int, int]:
        if self.subspace_dim is not None and self.keep is not None:
            refuse_both("codec.keep", self.keep, self.bits_per_value)
            return self.subspace_dim, self.keep
        total = resolve_kept("codec.keep + codec.subspace_dim", None, self.bits_per_value, hidden_dim)
        if self.keep is None and self.subspace_dim is None:
            return min(round(total * 48 / 77), total - 1), max(1, total * 28 // 77)
        if self.keep is not None:
            subspace_dim, keep = total - self.keep, self.keep
        else:
            assert self.subspace_dim is not None
            subspace_dim, keep = self.subspace_dim, total - self.subspace_dim
        if subspace_dim < 0 or keep < 1:
            raise UserError(
                f"codec.subspace_dim = {subspace_dim} and codec.keep = {keep} do not make a budget of "
                f"{total} values; set both, and no budget, to spend more"
            )
        return subspace_dim, keep

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """S for every token: distinct channel indices (N, K)."""
        return permuted_channels(keys, boundary, self.hidden_dim, self._sizes()[1])

    def initial_state(self, seed: int, boundary: int) -> CodecState:
        """A keyed random orthonormal basis: where the first fire's power iteration starts."""
        return CodecState(0, {"basis_DR": starting_basis(seed, boundary, self.hidden_dim, self._sizes()[0])})

    def learn(
        self,
        state: CodecState,
        moments: Moments,
        version: int,
        gradient_moments: Moments | None = None,
    ) -> CodecState:
        """Q <- qr(C Q), `power_iterations` times, as `subspace` does."""
        basis_DR = next_basis(state.tensors["basis_DR"], moments, self.power_iterations)
        return CodecState(version, {"basis_DR": basis_DR})

    @property
    def learns(self) -> bool:
        return self._sizes()[0] > 0

    @property
    def unbiased(self) -> frozenset[Direction]:
        return frozenset(("forward", "backward") if self.residual == "unbiased" else ())

    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        subspace_dim, keep = self._sizes()
        return (floats(subspace_dim, PAYLOAD_DTYPE), floats(keep, PAYLOAD_DTYPE))

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        basis_DR = state.tensors["basis_DR"]
        hidden_ND = hidden_ND.float()
        low_NR = saturated(hidden_ND @ basis_DR, PAYLOAD_DTYPE)
        return low_NR, self._masked(hidden_ND - low_NR.float() @ basis_DR.T, draw)

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        basis_DR = state.tensors["basis_DR"]
        return self._low_and_residual(sent, draw, basis_DR, project=self.symmetric)

    def encode_gradient(self, gradient_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        if self.symmetric:
            return self.encode(gradient_ND, draw, state)
        gradient_ND = gradient_ND.float()
        low_NR = saturated(gradient_ND @ state.tensors["basis_DR"], PAYLOAD_DTYPE)
        return low_NR, self._masked(gradient_ND, draw)

    def decode_gradient(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        return self._low_and_residual(sent, draw, state.tensors["basis_DR"], project=True)

    def _masked(self, values_ND: Tensor, draw: Tensor | None) -> Tensor:
        assert draw is not None
        scale = self.hidden_dim / self._sizes()[1] if self.residual == "unbiased" else 1.0
        return saturated(values_ND.gather(-1, draw.long()) * scale, PAYLOAD_DTYPE)

    def _low_and_residual(
        self, sent: Sent, draw: Tensor | None, basis_DR: Tensor, *, project: bool
    ) -> Tensor:
        """Q low + x, or Q low + (I - P) x = x + Q (low - Q^T x), x the residual at its channels."""
        assert draw is not None
        low_NR, kept_NK = sent
        residual_ND = scatter_channels(kept_NK, draw, self.hidden_dim)
        low_NR = low_NR.float()
        if project:
            low_NR = low_NR - residual_ND @ basis_DR
        return residual_ND + low_NR @ basis_DR.T

    def _sizes(self) -> tuple[int, int]:
        assert self.subspace_dim is not None
        assert self.keep is not None
        return self.subspace_dim, self.keep
