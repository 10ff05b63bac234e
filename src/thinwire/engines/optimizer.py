"""fp32 master weights, gradient accumulation, the anchor merge, clipping and AdamW."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from thinwire.engines.base import Update, UpdateSettings
from thinwire.models.stages import Stages, stage_of_parameters

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(BaseModel):
    """AdamW (Loshchilov and Hutter, 2019) on fp32 masters, torch.optim.AdamW."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    learning_rate: float = Field(1e-6, ge=0, le=1)
    """Constant step size; 0 is a useful control: every series must stay flat."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the two moments, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled decay a step, times the learning rate."""
    grad_clip: float = Field(1.0, gt=0)
    """Bound on the global gradient norm."""


def signed_merge(gradient: Tensor, average: Tensor, alpha: float) -> Tensor:
    """G = alpha G_fast + (1 - alpha) |G_fast| sign(M), per coordinate (docs/concepts.md, two circuits)."""
    return alpha * gradient + (1.0 - alpha) * gradient.abs() * average.sign()


class Master:
    """The trained weights: fp32 masters (the model's own parameters when it computes in fp32 or wider).

    Gradients of micro-batches are added in fp32. The global norm is summed a stage at a time and then
    across stages, the order a pipeline of processes must use too.
    """

    def __init__(self, model: nn.Module, stages: Stages, config: AdamWConfig) -> None:
        named = list(model.named_parameters())
        self._names = [name for name, _ in named]
        self._compute = [parameter for _, parameter in named]
        self._stage = stage_of_parameters(stages, self._names)
        self._own = [nn.Parameter(p.detach().float()) if p.dtype.itemsize < 4 else p for p in self._compute]
        self._optimizer = torch.optim.AdamW(
            self._own,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._average: list[Tensor] | None = None

    def accumulate_(self) -> None:
        """Move the micro-batch's gradients to the masters (a no-op where both are one tensor)."""
        for own, compute in zip(self._own, self._compute, strict=True):
            if own is compute or compute.grad is None:
                continue
            if own.grad is None:
                own.grad = compute.grad.float()
            else:
                own.grad += compute.grad
            compute.grad = None

    def average_anchor_(self, gradient: Sequence[Tensor], beta: float) -> None:
        """M <- beta M + (1 - beta) G_anchor; the first fire starts from M = 0."""
        if self._average is None:
            self._average = [torch.zeros_like(own) for own in self._own]
        for average, share in zip(self._average, gradient, strict=True):
            average.mul_(beta).add_(share, alpha=1.0 - beta)

    @torch.no_grad()
    def update_(self, settings: UpdateSettings) -> Update:
        """Merge, clip, step. A gradient that is not finite changes nothing."""
        gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in self._own]
        if settings.merge_alpha < 1.0 and self._average is not None:
            gradients = [
                signed_merge(g, m, settings.merge_alpha)
                for g, m in zip(gradients, self._average, strict=True)
            ]
        norm = self._global_norm(gradients)
        self._optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(norm):
            return Update(float(norm), applied=False)
        torch._foreach_mul_(gradients, torch.clamp(settings.grad_clip / (norm + 1e-6), max=1.0))
        for own, gradient in zip(self._own, gradients, strict=True):
            own.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._publish_()
        sums = torch.stack(torch._foreach_norm([own.detach() for own in self._own]))
        return Update(float(norm), applied=True, weights_finite=bool(torch.isfinite(sums).all()))

    def _global_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """sqrt(sum over stages of sum over the stage's parameters of |g|^2)."""
        squares = [torch.zeros((), device=gradients[0].device) for _ in range(max(self._stage) + 1)]
        for stage, gradient in zip(self._stage, gradients, strict=True):
            squares[stage] = squares[stage] + gradient.square().sum()
        return torch.stack(squares).sum().sqrt()

    def _publish_(self) -> None:
        for own, compute in zip(self._own, self._compute, strict=True):
            if own is not compute:
                compute.copy_(own)

    def state(self) -> dict[str, Tensor]:
        """Masters, AdamW moments and step counts, and the anchor's average, by parameter name."""
        tensors: dict[str, Tensor] = {}
        for index, (name, own) in enumerate(zip(self._names, self._own, strict=True)):
            tensors[f"weight.{name}"] = own.detach()
            for key, value in self._optimizer.state.get(own, {}).items():
                tensors[f"adamw.{key}.{name}"] = value
            if self._average is not None:
                tensors[f"anchor_average.{name}"] = self._average[index]
        return tensors

    @torch.no_grad()
    def load_state_(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave; KeyError names a missing tensor, ValueError one of another shape."""
        device = self._own[0].device
        self._refuse_other_shapes(state)
        self._optimizer.state.clear()
        for name, own in zip(self._names, self._own, strict=True):
            own.copy_(state[f"weight.{name}"])
            kept = ("step", "exp_avg", "exp_avg_sq")
            if f"adamw.step.{name}" in state:
                self._optimizer.state[own] = {
                    key: state[f"adamw.{key}.{name}"].to(device, copy=True) for key in kept
                }
        averages = [state.get(f"anchor_average.{name}") for name in self._names]
        known = [average.to(device, copy=True) for average in averages if average is not None]
        self._average = known or None
        self._publish_()

    def _refuse_other_shapes(self, state: Mapping[str, Tensor]) -> None:
        """AdamW's fused kernel trusts its moments' shapes: a wrong one would overwrite memory."""
        for name, own in zip(self._names, self._own, strict=True):
            for kind in ("weight", "adamw.exp_avg", "adamw.exp_avg_sq", "anchor_average"):
                tensor = state.get(f"{kind}.{name}")
                if tensor is not None and (tensor.shape != own.shape or tensor.dtype != own.dtype):
                    raise ValueError(
                        f"{kind}.{name} must be {own.dtype} of shape {tuple(own.shape)}, "
                        f"got {tensor.dtype} of {tuple(tensor.shape)}"
                    )
            step = state.get(f"adamw.step.{name}")
            if step is not None and step.numel() != 1:
                raise ValueError(f"adamw.step.{name} must be one number, got {step.numel()}")
