"""The one interface behind which models are trained, in one process or over a pipeline.

Letters: B rows, R response positions, D hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from thinwire.codecs import Moments, View
from thinwire.engines.batch import Batch

Policy = Literal["current", "reference", "snapshot"]
"""Which weights a pass runs: the trained ones, the frozen start, or the anchor's stale snapshot."""


@dataclass(frozen=True)
class Reading:
    """What one pass gives for a micro-batch: per response token, fp32, 0 at padding."""

    logprob_BR: Tensor
    entropy_BR: Tensor


LossFunction = Callable[[int, Batch, Reading], Tensor]
"""(index of the micro-batch within the mini-batch, batch, reading) -> this micro-batch's share of the
mini-batch's loss, a scalar with gradient. Shares add up: no engine rescales them."""


@dataclass(frozen=True)
class AnchorReading:
    """What a codec-off pass on a snapshot gives: moments of the hidden states a boundary; where a loss was
    given, also its gradient in the parameters and the moments of its gradients at the boundaries."""

    moments: tuple[Moments, ...]
    gradient: tuple[Tensor, ...] | None
    num_tokens: int
    gradient_moments: tuple[Moments, ...] | None = None


@dataclass(frozen=True)
class Update:
    """One optimizer tick: the gradient norm before clipping, whether the weights were changed, and whether
    they are finite after it."""

    grad_norm: float
    applied: bool
    weights_finite: bool = True


@dataclass(frozen=True)
class UpdateSettings:
    """What may change between ticks: the rate, the clip bound and the anchor merge's alpha (1 = off)."""

    learning_rate: float
    grad_clip: float
    merge_alpha: float = 1.0


class Engine(Protocol):
    """Stages, optimizer and passes. Every pass sends hidden states through the View it is given."""

    boundaries: tuple[int, ...]
    num_boundaries: int
    hidden_dim: int
    dtype: torch.dtype
    device: torch.device

    def forward(
        self,
        batches: Sequence[Batch],
        view: View,
        policy: Policy = "current",
        *,
        with_entropy: bool = True,
        with_errors: bool = False,
    ) -> list[Reading]:
        """Log-probabilities of the response tokens, and their entropy if asked (else 0), without gradient.

        `with_errors` also keeps what the view changed at the boundaries, for `take_errors`.
        """
        ...

    def train_step(self, batches: Sequence[Batch], view: View, loss_function: LossFunction) -> list[float]:
        """Forward and backward over a mini-batch's micro-batches; gradients add up. Returns the losses."""
        ...

    def boundary_moments(
        self,
        batches: Sequence[Batch],
        view: View,
        policy: Policy = "current",
        loss_function: LossFunction | None = None,
    ) -> AnchorReading:
        """Codec-off statistics at every boundary over real tokens; of a loss, if given, also its gradient in
        the parameters and the statistics of dL/dh.

        Leaves parameters, accumulated gradients, optimizer and random state untouched.
        """
        ...

    def take_snapshot(self, step: int) -> None:
        """Remember the current weights as those of rollout step `step`, for a later stale anchor."""
        ...

    def use_snapshot(self, step: int) -> None:
        """Make the oldest weights kept at or after `step` those of policy "snapshot", or the current ones
        where none were kept. Older ones are forgotten."""
        ...

    def merge_anchor(self, gradient: tuple[Tensor, ...], beta: float) -> None:
        """M <- beta M + (1 - beta) G_anchor."""
        ...

    def apply_update(self, settings: UpdateSettings) -> Update:
        """Merge, clip, one optimizer step, gradients cleared. A gradient that is not finite is refused:
        weights and optimizer state stay as they were and `applied` is False."""
        ...

    def take_timings(self) -> dict[str, float]:
        """Seconds of "forward" and "backward" of training passes since the last call."""
        ...

    def take_errors(self) -> Tensor:
        """Mean of h~ - h over the real tokens of the last forward pass with errors: (boundaries, D), fp32."""
        ...

    def gather_weights(self, policy: Policy = "current") -> Mapping[str, Tensor]:
        """The weights of a policy by the model's own parameter names, in the compute type."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, as named tensors; weight.NAME is the optimizer's fp32 copy."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        ...
