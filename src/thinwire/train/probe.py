"""The codec-off readings: the trained weights without the lens, beside the codec-view readings.

A probe runs between the reference pass and the updates, without gradient and with keyed draws of its own,
so it changes no bit of a run. Its dense passes are counted in wire/probe_bytes: two over the step's tokens
(current and reference weights) and two over those of the held batch.

Letters: B rows, R response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from thinwire.codecs import View
from thinwire.core.errors import UserError
from thinwire.engines.base import Engine, Reading
from thinwire.engines.batch import Batch
from thinwire.rl.kl import kl_estimate
from thinwire.sampling.base import Sampler, SamplingConfig
from thinwire.tasks.base import Problem
from thinwire.train.rollout import Workload, validate


class ProbeConfig(BaseModel):
    """Codec-off readings of the trained weights beside the lens readings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    every: int = Field(0, ge=0)
    """Rollout steps between readings, from step 1, and at the last; 0 = off. A probe never changes a run."""
    held_prompts: int = Field(64, ge=0)
    """Validation problems of the fixed batch, answered once by the initial policy; 0 = no fixed batch."""
    error_growth: bool = True
    """Accumulate the codec's mean error at every boundary, every step (costs one sum in the old pass)."""
    greedy: bool = False
    """Also score greedy answers to the problems of the fixed batch (costs their sampling)."""
    movement: bool = False
    """Also record how far every block's weights are from the start (movement.jsonl), after the step."""

    @model_validator(mode="after")
    def _refuse_ignored_settings(self) -> Self:
        if self.movement and not self.every:
            raise UserError("probe.movement = true has no effect with probe.every = 0; set probe.every = 20")
        return self


@dataclass(frozen=True)
class Held:
    """The fixed batch: one sampled answer of the INITIAL policy to each of some held-out problems."""

    problems: list[Problem]
    batches: list[Batch]


@dataclass(frozen=True)
class Probed:
    """The series of one probe, and how many tokens crossed every boundary dense for it."""

    series: dict[str, float]
    num_tokens: int = 0


def dense_probe(
    engine: Engine,
    batches: Sequence[Batch],
    view: View,
    old: Sequence[Reading],
    reference: Sequence[Reading],
    held: Held | None,
) -> Probed:
    """probe/* on this step's rollouts and on the held batch, in nats a token.

    On the step's rollouts, sampled (at temperature 1, no top-p or top-k) from pi_t itself:
        kl_dense = mean(e^d - d - 1), d = log pi_ref - log pi_t, codec off for both: Schulman's unbiased k3 of
        KL(current || reference); entropy_dense = mean entropy of pi_t;
        kl_gain = the codec-view k3 of the same weights and tokens (clamped as in actor/kl_loss) / kl_dense,
        left out where kl_dense is 0.
    On the held batch, sampled from pi_ref:
        held_kl = the same with d = log pi_t - log pi_ref: unbiased for KL(reference || current);
        held_entropy = mean entropy of pi_t there.
    Called before the step's updates, or the step's tokens would be one step old.
    """
    dense = view.dense()
    current = engine.forward(batches, dense)
    base = engine.forward(batches, dense, "reference", with_entropy=False)
    kl, entropy = _mean_k3(batches, current, base), _mean_entropy(batches, current)
    series = {"probe/kl_dense": kl, "probe/entropy_dense": entropy}
    if kl > 0.0:
        series["probe/kl_gain"] = _mean_k3(batches, old, reference, clamped=True) / kl
    num_tokens = 2 * _num_tokens(batches)
    if held is not None:
        now = engine.forward(held.batches, dense)
        start = engine.forward(held.batches, dense, "reference", with_entropy=False)
        series["probe/held_kl"] = _mean_k3(held.batches, start, now)
        series["probe/held_entropy"] = _mean_entropy(held.batches, now)
        num_tokens += 2 * _num_tokens(held.batches)
    return Probed(series, num_tokens)


def greedy_score(work: Workload, sampler: Sampler, held: Held, sampling: SamplingConfig) -> dict[str, float]:
    """probe/score_greedy: mean score of greedy answers of the pushed weights to the held problems."""
    return {"probe/score_greedy": validate(work, sampler, held.problems, sampling, batch_rows=0)}


def _mean_k3(
    batches: Sequence[Batch], sampled: Sequence[Reading], other: Sequence[Reading], clamped: bool = False
) -> float:
    """Token mean of e^d - d - 1, d = other - sampled: KL(sampled || other) on tokens of `sampled`."""
    total = 0.0
    for batch, own, against in zip(batches, sampled, other, strict=True):
        estimate = kl_estimate(own.logprob_BR, against.logprob_BR, batch.response_mask_BR, "k3")
        total += float((estimate.value_BR if clamped else estimate.unclamped_BR).sum())
    return total / _num_responses(batches)


def _mean_entropy(batches: Sequence[Batch], readings: Sequence[Reading]) -> float:
    pairs = zip(batches, readings, strict=True)
    total = sum(float((now.entropy_BR * batch.response_mask_BR).sum()) for batch, now in pairs)
    return total / _num_responses(batches)


def _num_responses(batches: Sequence[Batch]) -> int:
    return max(1, sum(batch.num_response_tokens for batch in batches))


def _num_tokens(batches: Sequence[Batch]) -> int:
    return sum(batch.input_ids_BT.numel() for batch in batches)
