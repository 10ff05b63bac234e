"""The codec whose error is shaped: bits go where the policy feels an error, in both directions.

Letters: N tokens, D hidden size, M directions kept of a transform, W words of keyed signs.
"""

import math
from typing import Literal, Self, get_args

import torch
from pydantic import Field as Setting
from torch import Tensor

from thinwire.codecs import transform_coding as coding
from thinwire.codecs.base import Codec, CodecState, Direction, Moments
from thinwire.codecs.budget import budget_bits, too_small
from thinwire.codecs.packing import Field, Sent, codes
from thinwire.codecs.transform_coding import GAIN_BITS, Transform
from thinwire.core.errors import NonFinite
from thinwire.core.keys import Stream, TokenKeys, normals, scalar_keys

_SPREAD_FLOOR = 1e-6
"""Least standard deviation of a direction against the largest: a direction never seen is not divided by 0."""


class Shaped(Codec):
    """h~ = mean + Q(h - mean): transform coding with statistics of its own in each direction.

    Forward: E, F diagonalise the covariance C of h under the error weight W = (1 - a) I + a G D / tr G, G the
    second moment of dL/dh, a = `sensitivity`: what is minimised is E[(h~ - h)^T W (h~ - h)], to first order
    the mean squared change of the loss. Backward: the eigenbasis of G. The leading M directions share the
    budget by `allocate_bits` (integer reverse water-filling with Lloyd-Max errors); directions with equal
    bits are flipped by keyed signs, mixed by a DCT, divided by the token's gain and quantised.

    Biased: Lloyd-Max levels are conditional means, so decoded values are shrunk, and what has no bits is
    dropped until the next fire. Its error is about sum_i l_i d(b_i) in the weighted norm, d(1) = 0.363,
    d(2) = 0.117, d(3) = 0.035.
    Sources: Max 1960 (levels); Shoham and Gersho 1988 (bits); Gersho and Gray, "Vector Quantization and
    Signal Compression" (transform coding, gain-shape); Vargaftik et al., "DRIVE", 2021 (keyed rotation).

    Wire: 8 floor(bits_per_value D / 8) bits a token a boundary, each direction, of which 8 are the gain. Side
    channel a boundary a fire: decode matrices in bf16, spreads and bits of both directions, the mean.
    The running moments and encode matrices (own_*) stay where they were computed.
    """

    name: Literal["shaped"] = "shaped"
    bits_per_value: float | None = None
    """Budget; default that of exact-k at this width, 16 round(0.05 D) bits."""
    sensitivity: float = Setting(0.9, ge=0, le=1)
    """a: how much of the forward error weight is the gradient's second moment (0: plain squared error)."""
    memory: float = Setting(0.9, ge=0, lt=1)
    """Decay of the running moments from fire to fire."""

    def at_width(self, hidden_dim: int) -> Self:
        num_bits = budget_bits(self.bits_per_value, hidden_dim)
        if num_bits < GAIN_BITS + 8:
            raise too_small(self.bits_per_value, hidden_dim, GAIN_BITS + 8)
        return self.model_copy(update={"hidden_dim": hidden_dim, "bits_per_value": num_bits / hidden_dim})

    def draw(self, keys: TokenKeys, boundary: int) -> Tensor:
        """2 M fair signs for every token, 32 in a word: forward, then backward (N, W)."""
        return coding.keyed_signs(keys, boundary, 2 * self._num_directions)

    def layout(self, dtype: torch.dtype) -> tuple[Field, ...]:
        """The whole budget as single bits; how it is cut into codes depends on what was learned."""
        return (codes(self._num_bits, 1),)

    def fields(self, dtype: torch.dtype, direction: Direction, state: CodecState) -> tuple[Field, ...]:
        return _transform(state, direction).fields(self._num_bits)

    def encode(self, hidden_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        centred_ND = hidden_ND.float() - state.tensors["mean_D"]
        gain_N1, *rest = self._encode(centred_ND, draw, state, "forward")
        is_zero_N1 = (hidden_ND == 0).all(-1, keepdim=True)  # gain 0 is the zero vector, gain 1 the mean
        return (torch.where(is_zero_N1, 0, gain_N1.clamp(min=1)), *rest)

    def decode(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        decoded_ND = self._decode(sent, draw, state, "forward")
        return torch.where(sent[0] > 0, decoded_ND + state.tensors["mean_D"], 0.0)

    def encode_gradient(self, gradient_ND: Tensor, draw: Tensor | None, state: CodecState) -> Sent:
        return self._encode(gradient_ND.float(), draw, state, "backward")

    def decode_gradient(self, sent: Sent, draw: Tensor | None, state: CodecState) -> Tensor:
        return self._decode(sent, draw, state, "backward")

    def _encode(self, x_ND: Tensor, draw: Tensor | None, state: CodecState, direction: Direction) -> Sent:
        return coding.encode(x_ND, _transform(state, direction), self._signs(draw, direction), self._num_bits)

    def _decode(self, sent: Sent, draw: Tensor | None, state: CodecState, direction: Direction) -> Tensor:
        return coding.decode(sent, _transform(state, direction), self._signs(draw, direction))

    def _signs(self, draw: Tensor | None, direction: Direction) -> Tensor:
        assert draw is not None
        first = 0 if direction == "forward" else self._num_directions
        return coding.signs_of(draw, first, self._num_directions)

    def initial_state(self, seed: int, boundary: int) -> CodecState:
        """A keyed random basis with equal bits, no mean: works before any fire, without having learned."""
        num = self._num_directions
        gaussian_DM = normals(scalar_keys(seed, 0), Stream.BASIS, boundary, self.hidden_dim * num)
        basis_DM, _ = torch.linalg.qr(gaussian_DM.view(self.hidden_dim, num))
        zeros_DD = torch.zeros(self.hidden_dim, self.hidden_dim)
        tensors = {"mean_D": torch.zeros(self.hidden_dim), "own_sum_D": torch.zeros(self.hidden_dim)}
        for direction in get_args(Direction):
            variance_M = torch.ones(num, dtype=torch.float64)
            tensors |= self._tensors(direction, basis_DM, basis_DM.T, variance_M)
            tensors |= {
                f"own_{direction}_second_DD": zeros_DD.clone(),
                f"own_{direction}_tokens": torch.zeros(1),
            }
        return CodecState(0, tensors)

    def learn(
        self,
        state: CodecState,
        moments: Moments,
        version: int,
        gradient_moments: Moments | None = None,
    ) -> CodecState:
        """Running moments, then both transforms; a direction that has seen nothing keeps what it had, and a
        fire without any gradient (all advantages zero) leaves the backward one alone.

        NonFinite where a moment is nan or inf. A singular covariance is no failure: its directions of no
        variance get no bits.
        """
        kept = dict(state.tensors)
        kept |= self._remember("forward", state, moments)
        kept["own_sum_D"] = self.memory * state.tensors["own_sum_D"] + moments.sum_D.float().cpu()
        if gradient_moments is not None and bool(gradient_moments.second_DD.any()):
            kept |= self._remember("backward", state, gradient_moments)
        hidden_DD, gradient_DD = _mean_square(kept, "forward"), _mean_square(kept, "backward")
        weight_DD = None
        if gradient_DD is not None:
            kept |= self._tensors(
                "backward", *coding.white_directions(gradient_DD, None, self._num_directions)
            )
            if self.sensitivity > 0:
                scale = self.sensitivity * self.hidden_dim / float(gradient_DD.trace())
                weight_DD = (1 - self.sensitivity) * torch.eye(self.hidden_dim).double() + scale * gradient_DD
        if hidden_DD is not None:
            mean_D = (kept["own_sum_D"] / kept["own_forward_tokens"]).double()
            covariance_DD = hidden_DD - torch.outer(mean_D, mean_D)
            kept["mean_D"] = mean_D.float()
            kept |= self._tensors(
                "forward", *coding.white_directions(covariance_DD, weight_DD, self._num_directions)
            )
        return CodecState(version, kept)

    def _remember(self, direction: Direction, state: CodecState, moments: Moments) -> dict[str, Tensor]:
        """S <- memory S + the fire's sum, and the same of its tokens."""
        if not bool(torch.isfinite(moments.second_DD).all()):
            raise NonFinite("anchor/moments", math.nan)
        second, tokens = f"own_{direction}_second_DD", f"own_{direction}_tokens"
        return {
            second: self.memory * state.tensors[second] + moments.second_DD.float().cpu(),
            tokens: self.memory * state.tensors[tokens] + moments.num_tokens,
        }

    def _tensors(
        self, direction: Direction, encode_DM: Tensor, decode_MD: Tensor, variance_M: Tensor
    ) -> dict[str, Tensor]:
        spread_M = variance_M.sqrt()
        largest = float(spread_M.max())
        spread_M = spread_M.clamp(min=_SPREAD_FLOOR * largest) if largest > 0 else torch.ones_like(spread_M)
        bits_M = coding.allocate_bits(variance_M.tolist(), self._num_bits - GAIN_BITS)
        return {
            f"{direction}_decode_MD": decode_MD.to(torch.bfloat16).contiguous(),
            f"{direction}_spread_M": spread_M.float(),
            f"{direction}_bits_M": torch.tensor(bits_M, dtype=torch.uint8),
            f"own_{direction}_encode_DM": encode_DM.float().contiguous(),
        }

    @property
    def learns(self) -> bool:
        return True

    @property
    def learns_from_gradients(self) -> bool:
        return True

    @property
    def is_linear(self) -> bool:
        return False

    @property
    def _num_bits(self) -> int:
        assert self.bits_per_value is not None
        return round(self.bits_per_value * self.hidden_dim)

    @property
    def _num_directions(self) -> int:
        """M: two bits each on average would use up the budget; steeper spectra leave some without any."""
        return min(self.hidden_dim, -(-(self._num_bits - GAIN_BITS) // 2))


def _transform(state: CodecState, direction: Direction) -> Transform:
    tensors = state.tensors
    return Transform(
        tensors[f"own_{direction}_encode_DM"],
        tensors[f"{direction}_decode_MD"],
        tensors[f"{direction}_spread_M"],
        tensors[f"{direction}_bits_M"],
    )


def _mean_square(tensors: dict[str, Tensor], direction: Direction) -> Tensor | None:
    """The running second moment a token in float64, None where nothing but zeros was seen."""
    second_DD, tokens = tensors[f"own_{direction}_second_DD"], tensors[f"own_{direction}_tokens"]
    if not float(second_DD.diagonal().sum()) > 0:
        return None
    return second_DD.double() / tokens.double()
