"""The loss of one optimizer tick as a list of terms, and the numbers each micro-batch leaves behind.

Letters: B rows, R response positions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from thinwire.control import Settings
from thinwire.core.errors import NonFinite
from thinwire.engines.base import Reading
from thinwire.engines.batch import Batch
from thinwire.rl.aggregation import AggregationMode, Denominator, aggregate
from thinwire.rl.corrections import truncated_importance_weights
from thinwire.rl.kl import KlEstimate, kl_estimate
from thinwire.rl.policy_loss import PolicyLoss, policy_loss


class RlConfig(BaseModel):
    """GRPO (Shao et al., 2024) with the dual clip (Ye et al., 2020), as verl 0.9.1 computes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    mini_batch_prompts: int = Field(0, ge=0)
    """Prompts of one optimizer tick; 0 = all prompts of the step, one tick."""
    micro_batch_rows: int = Field(0, ge=0)
    """Rows of one forward and backward; 0 = the whole mini-batch."""
    length_bucket: int = Field(8, ge=1)
    """Micro-batches are padded to a multiple of this many tokens."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float = Field(3.0, gt=1)
    """c: with a negative advantage the loss of a token is at most -c A."""
    aggregation: AggregationMode = "token-mean"
    """How token losses become one number (verl's five modes)."""
    standardise: bool = True
    """Divide the group-centred score by the group's standard deviation."""
    kl_coefficient: float = Field(0.001, ge=0)
    """Weight of the KL term to the reference in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(current || reference); k3 is verl's low-variance KL."""
    entropy_coefficient: float = Field(0.0, allow_inf_nan=False)
    """Weight of the entropy bonus (subtracted from the loss)."""
    view_alignment_weight: float = Field(0.0, ge=0)
    """lambda: minus lambda times the mean codec-view log-probability of the sampler's own tokens."""
    importance_truncation: float | None = Field(None, gt=0)
    """Truncation of the token-level weights exp(old - rollout); off by default."""
    logprob_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens whose logits are held at once; default by a 64 MiB budget."""


@dataclass(frozen=True)
class Inputs:
    """What the terms of one micro-batch see; everything but `reading` is constant."""

    batch: Batch
    reading: Reading
    policy: PolicyLoss
    kl: KlEstimate


@dataclass(frozen=True)
class Term:
    """One addend: weight x aggregate(values_BR(inputs)); its unweighted aggregate is logged as `key`."""

    key: str
    weight: float
    values_BR: Callable[[Inputs], Tensor]


def initial_settings(rl: RlConfig, anchor_cadence: int) -> Settings:
    """The settings of a recipe before any controller."""
    return Settings(rl.kl_coefficient, rl.view_alignment_weight, anchor_cadence)


def loss_terms(rl: RlConfig, settings: Settings) -> list[Term]:
    """L = L_policy + kl_coefficient KL - entropy_coefficient H - view_alignment_weight log v."""
    return [
        Term("actor/pg_loss", 1.0, lambda inputs: inputs.policy.loss_BR),
        Term("actor/kl_loss", settings.kl_coefficient, lambda inputs: inputs.kl.value_BR),
        Term("actor/entropy_loss", -rl.entropy_coefficient, lambda inputs: inputs.reading.entropy_BR),
        Term("actor/view_alignment_loss", settings.view_alignment_weight, _negative_logprob),
    ]


def _negative_logprob(inputs: Inputs) -> Tensor:
    return -inputs.reading.logprob_BR


@dataclass(frozen=True)
class Losses:
    """The loss function of one mini-batch, closed over its old and reference log-probabilities.

    `readings` collects one dict of shares a micro-batch.
    """

    rl: RlConfig
    terms: Sequence[Term]
    denominator: Denominator
    old_logprob_BR: Sequence[Tensor] | None
    """One a micro-batch; None takes the pass's own detached log-probabilities (ratio exactly 1)."""
    reference_logprob_BR: Sequence[Tensor] | None
    """One a micro-batch; None (allowed without a KL term) takes the pass's own, so the KL reads 0."""
    readings: list[dict[str, float]]

    def __call__(self, index: int, batch: Batch, reading: Reading) -> Tensor:
        """This micro-batch's share of the loss; appends its sums to `readings`."""
        inputs = self._inputs(index, batch, reading)
        mask_BR = batch.response_mask_BR
        loss = torch.zeros((), device=mask_BR.device)
        values: dict[str, Tensor] = {}
        for term in self.terms:
            share = aggregate(term.values_BR(inputs), mask_BR, self.rl.aggregation, self.denominator)
            values[term.key] = share.detach()
            if term.weight != 0.0:
                loss = loss + term.weight * share
        values["actor/loss"] = loss.detach()
        values |= token_means(inputs, self.denominator.tokens)
        numbers = torch.stack([value.double() for value in values.values()]).tolist()
        shares = dict(zip(values, numbers, strict=True))
        refuse_non_finite(shares)
        self.readings.append(shares)
        return loss

    def _inputs(self, index: int, batch: Batch, reading: Reading) -> Inputs:
        mask_BR = batch.response_mask_BR
        own_BR = reading.logprob_BR.detach()
        old_BR = own_BR if self.old_logprob_BR is None else self.old_logprob_BR[index]
        policy = policy_loss(
            reading.logprob_BR,
            old_BR,
            batch.advantage_B,
            mask_BR,
            self.rl.clip_low,
            self.rl.clip_high,
            self.rl.dual_clip,
        )
        if self.rl.importance_truncation is not None:
            weight_BR = truncated_importance_weights(
                old_BR, batch.rollout_logprob_BR, mask_BR, self.rl.importance_truncation
            )
            policy = replace(policy, loss_BR=policy.loss_BR * weight_BR)
        reference_BR = own_BR if self.reference_logprob_BR is None else self.reference_logprob_BR[index]
        return Inputs(
            batch,
            reading,
            policy,
            kl_estimate(reading.logprob_BR, reference_BR, mask_BR, self.rl.kl_estimator),
        )


def total_denominator(batches: Sequence[Batch], norm_tokens: int) -> Denominator:
    """Token and non-empty sequence counts of a whole mini-batch, over all its micro-batches."""
    lengths = torch.cat([batch.response_length_B for batch in batches])
    return Denominator(int(lengths.sum()), int((lengths > 0).sum()), norm_tokens)


def refuse_non_finite(readings: Mapping[str, float]) -> None:
    """Raise NonFinite for the first reading, in order, that is nan or inf."""
    for series, value in readings.items():
        if not math.isfinite(value):
            raise NonFinite(series, value)


def token_means(inputs: Inputs, num_tokens: int) -> dict[str, Tensor]:
    """Shares of the mini-batch's token means of the clip branches, ppo_kl and the unclamped k3."""
    policy, kl = inputs.policy, inputs.kl
    per_token = {
        "actor/pg_clipfrac/above_range": policy.clipped_above_BR,
        "actor/pg_clipfrac/below_range": policy.clipped_below_BR,
        "actor/pg_clipfrac_lower": policy.clipped_dual_BR,
        "actor/ppo_kl": policy.negative_log_ratio_BR,
        "actor/kl_unclamped": kl.unclamped_BR,
        "actor/kl_clamped_share": kl.clamped_BR,
    }
    shares = {key: value.sum().double() / max(1, num_tokens) for key, value in per_token.items()}
    shares["actor/pg_clipfrac"] = (
        shares["actor/pg_clipfrac/above_range"] + shares["actor/pg_clipfrac/below_range"]
    )
    return shares


def mean_over_ticks(ticks: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Micro-batch shares add up to a tick's value; a step logs the mean over its ticks."""
    sums: list[dict[str, float]] = []
    for tick in ticks:
        total: dict[str, float] = {}
        for shares in tick:
            for key, value in shares.items():
                total[key] = total.get(key, 0.0) + value
        sums.append(total)
    return {key: sum(total[key] for total in sums) / len(sums) for key in (sums[0] if sums else {})}
