"""The boundary: what a stage sends through a codec, and what the gradient sends back.

Letters: B rows, T positions, D hidden size, K values sent per token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, CodecState, Direction
from thinwire.codecs.identity import Identity
from thinwire.codecs.packing import saturated
from thinwire.core.errors import NonFinite
from thinwire.core.keys import TokenKeys


class _Crossing(torch.autograd.Function):
    """forward: decode(encode(h)); backward: decode_gradient(encode_gradient(g)), the codec's adjoint."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, codec: Codec, draw: Tensor | None, state: CodecState, boundary: int
    ) -> Tensor:
        _refuse_non_finite(hidden, boundary, "forward")
        ctx.codec, ctx.draw, ctx.state, ctx.boundary = codec, draw, state, boundary
        return saturated(codec.decode(codec.encode(hidden, draw, state), draw, state), hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        _refuse_non_finite(gradient, ctx.boundary, "backward")
        sent = ctx.codec.encode_gradient(gradient, ctx.draw, ctx.state)
        decoded = ctx.codec.decode_gradient(sent, ctx.draw, ctx.state)
        return saturated(decoded, gradient.dtype), None, None, None, None


def cross(
    hidden_BTD: Tensor, codec: Codec, draw: Tensor | None, state: CodecState, boundary: int = 0
) -> Tensor:
    """h~ of the next stage, with dL/dh through the codec's adjoint in backward.

    Bit-identical to packing the payload, sending its bytes and unpacking them (the contract suite
    checks it), which the real wire does. NonFinite, naming boundary and direction, where a hidden state or
    a gradient is nan or inf: a quantised payload could not tell. What is decoded beyond the range of h's
    type (a mask times D / K in fp16) becomes the largest value of that type.
    """
    crossed: Tensor = _Crossing.apply(hidden_BTD, codec, draw, state, boundary)  # type: ignore[no-untyped-call]
    return crossed


def _refuse_non_finite(values: Tensor, boundary: int, direction: Direction) -> None:
    if not bool(torch.isfinite(values).all()):
        raise NonFinite(f"boundary/{boundary}/{direction}", math.nan)


@dataclass(frozen=True)
class View:
    """How the trainer sees the model during one step: one codec, one state a boundary, one draw.

    The old, reference and training passes of a step all get the same View, so at the first inner update
    the PPO ratio is exactly 1. It is a value: nothing can publish a new basis into it. Samplers,
    validation and saved models never get one.
    """

    codec: Codec
    states: tuple[CodecState, ...]
    seed: int
    step: int
    _draws: dict[tuple[int, int, tuple[int, ...]], Tensor | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    def cross(self, hidden_BTD: Tensor, boundary: int, sample_B: Tensor) -> Tensor:
        """Send the hidden states of rows `sample_B` (right-padded) over one boundary."""
        draw = self.draw(boundary, sample_B, hidden_BTD.shape[1])
        return cross(hidden_BTD, self.codec, draw, self.states[boundary], boundary)

    def draw(self, boundary: int, sample_B: Tensor, num_positions: int) -> Tensor | None:
        """The draw of these rows at one boundary: computed once a step, reused by every pass."""
        slot = (boundary, num_positions, tuple(sample_B.tolist()))
        if slot not in self._draws:
            position_T = torch.arange(num_positions, device=sample_B.device)
            keys = TokenKeys(self.seed, self.step, sample_B[:, None], position_T[None, :])
            self._draws[slot] = self.codec.draw(keys, boundary)
        return self._draws[slot]

    def dense(self) -> "View":
        """The same weights seen with the codec off: the identity codec, nothing drawn."""
        codec = Identity().at_width(self.codec.hidden_dim)
        states = tuple(CodecState(0, {}) for _ in self.states)
        return replace(self, codec=codec, states=states, _draws={})

    def fingerprint(self) -> str:
        """Codec, learned states, seed and step in one string: equal for all passes of a step."""
        states = ".".join(state.fingerprint() for state in self.states)
        return f"{self.codec.fingerprint()}.{states}.{self.seed}.{self.step}"


def publish(
    codec: Codec,
    states: Sequence[CodecState],
    seed: int,
    step: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
) -> View:
    """Make the View of one step out of published states. The only place where a View begins, and where
    learned states meet the device of the model."""
    return View(codec, tuple(state.to(device) for state in states), seed, step)
