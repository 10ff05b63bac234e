"""The learned reference codec (PowerSGD-like): a subspace held fixed between anchor fires."""

import math
from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.codecs.base import PAYLOAD_DTYPE, Codec, CodecState, Moments
from thinwire.codecs.budget import resolve_kept
from thinwire.codecs.packing import Field, Sent, floats, saturated
from thinwire.core.errors import NonFinite, UserError
from thinwire.core.keys import Stream, normals, scalar_keys


class Subspace(Codec):
    """h~ = h Q Q^T with Q (D x R) orthonormal, learned by an anchor, fixed between its fires.

    Symmetric: dL/dh = (dL/dh~) Q Q^T. What lies in (I - Q Q^T) is thrown away on every step of the
    interval, so the error is a direction that the optimizer can follow.
    Source: Vogels et al., "PowerSGD", NeurIPS 2019, applied to activations.

    Wire: 16 R bits a token a boundary, each direction; side channel 32 D R bits a boundary a fire.
    """

    name: Literal["subspace"] = "subspace"
    subspace_dim: int | None = None
    """R, 1..D; default round(0.05 D)."""
    bits_per_value: float | None = None
    """Budget instead of subspace_dim: R = floor(bits_per_value D / 16)."""
    power_iterations: int = 2
    """Power iterations an anchor fire, each Q <- qr(C Q), started from the basis of the last fire."""

    def at_width(self, hidden_dim: int) -> Self:
        dim = resolve_kept("codec.subspace_dim", self.subspace_dim, self.bits_per_value, hidden_dim)
        if self.power_iterations < 1:
            raise UserError(f"codec.power_iterations must be at least 1, got {self.power_iterations}")
        update = {"hidden_dim": hidden_dim, "subspace_dim": dim, "bits_per_value": None}
        return self.model_copy(update=update)

    def initial_state(self, seed: int, boundary: int) -> CodecState:
        """A keyed random orthonormal basis: where the first fire's power iteration starts."""
        return CodecState(
            0, {"basis_DR": starting_basis(seed, boundary, self.hidden_dim, self.values_per_token())}
        )

    def learn(
        self,
        state: CodecState,
        moments: Moments,
        version: int,
        gradient_moments: Moments | None = None,
    ) -> CodecState:
        """Q <- qr(C Q), `power_iterations` times: see `next_basis`."""
        basis_DR = next_basis(state.tensors["basis_DR"], moments, self.power_iterations)
        return CodecState(version, {"basis_DR": basis_DR})

    @property
    def learns(self) -> bool:
        return True

    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        return (floats(self.values_per_token(), PAYLOAD_DTYPE),)

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        return (saturated(hidden_ND.float() @ state.tensors["basis_DR"], PAYLOAD_DTYPE),)

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        (values_NK,) = sent
        return values_NK.float() @ state.tensors["basis_DR"].T

    def values_per_token(self) -> int:
        """R."""
        assert self.subspace_dim is not None
        return self.subspace_dim


def starting_basis(seed: int, boundary: int, hidden_dim: int, subspace_dim: int) -> Tensor:
    """A keyed random orthonormal D x R, fp32: computed at one end and sent, as QR is not bit-reproducible."""
    gaussian_C = normals(scalar_keys(seed, 0), Stream.BASIS, boundary, hidden_dim * subspace_dim)
    basis_DR: Tensor = torch.linalg.qr(gaussian_C.float().view(hidden_dim, subspace_dim))[0]
    return basis_DR


def next_basis(basis_DR: Tensor, moments: Moments, power_iterations: int) -> Tensor:
    """Q <- qr(C Q), `power_iterations` times, C = sum h h^T / tokens (not centred, as h~ has no mean term).

    Iterated in float64 on the CPU and kept in fp32: Q^T Q = I to 1e-6 at every width, which a QR in fp32
    misses at D = 576.
    """
    second_DD = moments.second_DD.double().cpu() / max(1, moments.num_tokens)
    if not torch.isfinite(second_DD).all():
        raise NonFinite("anchor/moments", math.nan)
    basis_DR = basis_DR.double()
    for _ in range(power_iterations):
        basis_DR, _ = torch.linalg.qr(second_DD @ basis_DR)
    return basis_DR.float()
