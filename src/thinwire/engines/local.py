"""All stages in one process: the reference engine, whose boundaries run the codec without a wire.

Letters: B rows, T positions, R response positions, D hidden size, N response tokens.
"""

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.codecs import Moments, View
from thinwire.engines.base import (
    AnchorReading,
    LossFunction,
    Policy,
    Reading,
    Update,
    UpdateSettings,
)
from thinwire.engines.batch import Batch
from thinwire.engines.optimizer import AdamWConfig, Master
from thinwire.models.stages import Stages, split
from thinwire.rl.logprobs import logprobs_and_entropy


@dataclass(frozen=True)
class PassConfig:
    """What every pass needs besides its batch: the sampling temperature and the log-prob chunk."""

    temperature: float = 1.0
    chunk_tokens: int | None = None


class LocalEngine:
    """Engine over one process. The sampler may share this model: no pass ever leaves a trace in it."""

    def __init__(
        self,
        model: nn.Module,
        num_stages: int,
        boundaries: Sequence[int] | None,
        optimizer: AdamWConfig,
        passes: PassConfig,
        *,
        has_snapshot: bool,
    ) -> None:
        self.model = model
        self._reference_model = _frozen_copy(model)
        self._stages: dict[Policy, Stages] = {
            "current": split(model, num_stages, boundaries),
            "reference": split(self._reference_model, num_stages, boundaries, verify=False),
        }
        if has_snapshot:
            self._snapshot_model = _frozen_copy(model).requires_grad_(True)
            self._stages["snapshot"] = split(self._snapshot_model, num_stages, boundaries, verify=False)
        self._snapshots: dict[int, dict[str, Tensor]] = {}
        self._passes = passes
        self.boundaries = self._stages["current"].after
        self.num_boundaries = num_stages - 1
        self.hidden_dim = self._stages["current"].hidden_dim
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self._master = Master(model, self._stages["current"], optimizer)
        self._seconds = {"forward": 0.0, "backward": 0.0}
        self._errors: list[_ErrorSum] = []

    @torch.no_grad()
    def forward(
        self,
        batches: Sequence[Batch],
        view: View,
        policy: Policy = "current",
        *,
        with_entropy: bool = True,
        with_errors: bool = False,
    ) -> list[Reading]:
        if with_errors:
            self._errors = [_ErrorSum(self.hidden_dim, self.device) for _ in range(self.num_boundaries)]
        errors = self._errors if with_errors else ()
        return [
            self._read(batch, view, policy, errors=errors, with_entropy=with_entropy) for batch in batches
        ]

    def train_step(self, batches: Sequence[Batch], view: View, loss_function: LossFunction) -> list[float]:
        losses = []
        for index, batch in enumerate(batches):
            started = time.perf_counter()
            loss = loss_function(index, batch, self._read(batch, view, "current"))
            middle = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            self._master.accumulate_()
            losses.append(float(loss.detach()))
            self._seconds["forward"] += middle - started
            self._seconds["backward"] += time.perf_counter() - middle
        return losses

    def boundary_moments(
        self,
        batches: Sequence[Batch],
        view: View,
        policy: Policy = "current",
        loss_function: LossFunction | None = None,
    ) -> AnchorReading:
        watched = [_MomentSum(self.hidden_dim, self.device) for _ in range(self.num_boundaries)]
        num_tokens = sum(batch.input_ids_BT.numel() for batch in batches)
        if loss_function is None:
            with torch.no_grad():
                for batch in batches:
                    self._watch(batch, policy, watched)
            return AnchorReading(tuple(watch.moments() for watch in watched), None, num_tokens)
        backward = [_MomentSum(self.hidden_dim, self.device) for _ in range(self.num_boundaries)]
        both = list(zip(watched, backward, strict=True))
        gradient = self._dense_gradient(batches, view.dense(), policy, loss_function, both)
        moments = [tuple(watch.moments() for watch in half) for half in (watched, backward)]
        return AnchorReading(moments[0], gradient, num_tokens, moments[1])

    def _watch(self, batch: Batch, policy: Policy, watched: Sequence["_MomentSum"]) -> None:
        """Run the blocks up to the last boundary, which is all that statistics need."""
        hidden = batch.input_ids_BT
        for block, watch in zip(self._stages[policy].blocks[:-1], watched, strict=True):
            hidden = block(hidden)
            watch.add_(hidden, batch.token_mask_BT)

    def _dense_gradient(
        self,
        batches: Sequence[Batch],
        view: View,
        policy: Policy,
        loss_function: LossFunction,
        watched: Sequence[tuple["_MomentSum", "_MomentSum"]],
    ) -> tuple[Tensor, ...]:
        """fp32 sum over micro-batches of the loss's gradient in every parameter; .grad stays as it is."""
        parameters = list(self._model_of(policy).parameters())
        gradient = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for index, batch in enumerate(batches):
            reading = self._read(batch, view, policy, watched)
            loss = loss_function(index, batch, reading)
            shares = torch.autograd.grad(loss, parameters, allow_unused=True)
            for total, share in zip(gradient, shares, strict=True):
                if share is not None:
                    total += share.float()
        return tuple(gradient)

    def _read(
        self,
        batch: Batch,
        view: View,
        policy: Policy,
        watched: Sequence[tuple["_MomentSum", "_MomentSum"]] = (),
        errors: Sequence["_ErrorSum"] = (),
        with_entropy: bool = True,
    ) -> Reading:
        """One pass through all stages, then log-probabilities and entropy of the response tokens only."""
        stages = self._stages[policy]

        def send(hidden_BTD: Tensor, boundary: int) -> Tensor:
            sent_BTD = view.cross(hidden_BTD, boundary, batch.sample_B)
            if watched:
                forward, backward = watched[boundary]
                forward.add_(hidden_BTD.detach(), batch.token_mask_BT)
                see = functools.partial(backward.add_, mask_BT=batch.token_mask_BT)
                sent_BTD.register_hook(see)  # type: ignore[no-untyped-call]
            if errors:
                errors[boundary].add_(hidden_BTD, sent_BTD, batch.token_mask_BT)
            return sent_BTD

        normed_BTD = stages.forward(batch.input_ids_BT, send)
        return read_tokens(batch, normed_BTD, stages, self._passes, with_entropy)

    def _model_of(self, policy: Policy) -> nn.Module:
        if policy == "reference":
            return self._reference_model
        return self._snapshot_model if policy == "snapshot" else self.model

    def take_snapshot(self, step: int) -> None:
        # on the CPU: several may be kept, and device memory is the scarcer one
        self._snapshots[step] = {n: p.detach().to("cpu", copy=True) for n, p in self.model.named_parameters()}

    def use_snapshot(self, step: int) -> None:
        kept = {at: weights for at, weights in self._snapshots.items() if at >= step}
        weights = kept[min(kept)] if kept else dict(self.model.named_parameters())
        with torch.no_grad():
            for name, own in self._snapshot_model.named_parameters():
                own.copy_(weights[name])
        self._snapshots = kept

    def merge_anchor(self, gradient: tuple[Tensor, ...], beta: float) -> None:
        self._master.average_anchor_(gradient, beta)

    def apply_update(self, settings: UpdateSettings) -> Update:
        return self._master.update_(settings)

    def take_timings(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {"forward": 0.0, "backward": 0.0}
        return seconds

    def take_errors(self) -> Tensor:
        errors, self._errors = self._errors, []
        return torch.stack([error.mean() for error in errors]).cpu()

    def gather_weights(self, policy: Policy = "current") -> Mapping[str, Tensor]:
        return self._model_of(policy).state_dict()

    def state(self) -> dict[str, Tensor]:
        tensors = self._master.state()
        for at, weights in self._snapshots.items():
            tensors |= {f"snapshot.{at}.{name}": weight for name, weight in weights.items()}
        return tensors

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._master.load_state_(state)
        self._snapshots = {}
        for key, tensor in state.items():
            if key.startswith("snapshot."):
                _, at, name = key.split(".", 2)
                self._snapshots.setdefault(int(at), {})[name] = tensor.clone()


def read_tokens(
    batch: Batch, normed_BTD: Tensor, stages: Stages, passes: PassConfig, with_entropy: bool = True
) -> Reading:
    """Log-probability and entropy of each response token from the hidden state one position before it."""
    row_N, slot_N = batch.response_positions()
    at_N = batch.prompt_length_B[row_N] + slot_N
    target_N = batch.input_ids_BT[row_N, at_N]
    logprob_N, entropy_N = logprobs_and_entropy(
        normed_BTD[row_N, at_N - 1],
        stages.head,
        target_N,
        passes.temperature,
        passes.chunk_tokens,
        with_entropy,
    )
    empty_BR = logprob_N.new_zeros(batch.rollout_logprob_BR.shape)
    logprob_BR = empty_BR.index_put((row_N, slot_N), logprob_N)
    return Reading(logprob_BR, empty_BR.index_put((row_N, slot_N), entropy_N) if with_entropy else empty_BR)


class _MomentSum:
    """Running sum of x and x x^T over real tokens of one boundary, x a hidden state or its gradient."""

    def __init__(self, hidden_dim: int, device: torch.device) -> None:
        self._count = 0
        self._sum_D = torch.zeros(hidden_dim, device=device)
        self._second_DD = torch.zeros(hidden_dim, hidden_dim, device=device)

    def add_(self, hidden_BTD: Tensor, mask_BT: Tensor) -> None:
        hidden_ND = hidden_BTD[mask_BT].float()
        self._count += hidden_ND.shape[0]
        self._sum_D += hidden_ND.sum(0)
        self._second_DD += hidden_ND.T @ hidden_ND

    def moments(self) -> Moments:
        return Moments(self._count, self._sum_D, self._second_DD)


class _ErrorSum:
    """Running sum of h~ - h over real tokens of one boundary."""

    def __init__(self, hidden_dim: int, device: torch.device) -> None:
        self._count = 0
        self._sum_D = torch.zeros(hidden_dim, device=device)

    def add_(self, hidden_BTD: Tensor, sent_BTD: Tensor, mask_BT: Tensor) -> None:
        error_BTD = sent_BTD.float() - hidden_BTD.float()
        self._count += int(mask_BT.sum())
        self._sum_D += (error_BTD * mask_BT[..., None]).sum((0, 1))

    def mean(self) -> Tensor:
        return self._sum_D / max(1, self._count)


def _frozen_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)
