"""One rollout step, from prompts to update: read `run_step` from top to bottom.

    prompts -> dense samples -> scores -> micro-batches -> [anchor] -> View -> old, reference and
    training passes through that one View -> updates -> series

Letters: B rows, R response positions, N boundaries, D hidden size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.codecs import Codec, Identity, View, publish
from thinwire.control import Settings
from thinwire.engines.base import Engine, Reading, UpdateSettings
from thinwire.engines.batch import Batch, Rows, partition
from thinwire.instruments.mismatch import gap_means, mismatch_series
from thinwire.instruments.wire import WireShape, wire_bytes
from thinwire.sampling.base import Sampler
from thinwire.train import anchor as slow
from thinwire.train.clock import PhaseClock
from thinwire.train.config import Recipe, batch_rows
from thinwire.train.losses import (
    Losses,
    loss_terms,
    mean_over_ticks,
    refuse_non_finite,
    total_denominator,
)
from thinwire.train.probe import Held, Probed, dense_probe, greedy_score
from thinwire.train.rollout import Scored, Workload, refuse_scores, roll_out, rollout_series, score, to_rows


@dataclass(frozen=True)
class Parts:
    """What a run is made of; none of it changes from step to step but the engine's weights."""

    recipe: Recipe
    codec: Codec
    engine: Engine
    sampler: Sampler
    work: Workload
    held: Held | None = None
    """The probe's fixed batch, where it is on."""

    @property
    def watches_errors(self) -> bool:
        """Whether there is a codec error to accumulate, and the recipe asks for it."""
        sends = self.engine.num_boundaries > 0 and not isinstance(self.codec, Identity)
        return sends and self.recipe.probe.error_growth


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: its series, the anchor's next state and the rollouts."""

    metrics: dict[str, float]
    anchor: slow.AnchorState
    scored: Scored
    errors_ND: Tensor | None = None
    """What the view changed on average at every boundary in the old pass, where that is measured."""


def run_step(parts: Parts, step: int, settings: Settings, anchor: slow.AnchorState) -> StepResult:
    """Run rollout step `step` (1-based). Raises NonFinite before an update a bad number would reach."""
    recipe, engine, clock = parts.recipe, parts.engine, PhaseClock()
    with clock.phase("step"):
        with clock.phase("sampling"):
            parts.sampler.push(step, engine.gather_weights())
            problems = parts.work.task.prompts(step, recipe.sampling.prompts)
            rollouts = roll_out(parts.work, parts.sampler, problems, recipe.sampling, recipe.seed, step)
        with clock.phase("reward"):
            scored = score(parts.work, problems, rollouts, recipe.sampling.group_size)
            rows = to_rows(scored, recipe.rl.standardise)
            refuse_scores(scored, rows.advantages)
        ticks = micro_batches(parts, rows)
        batches = [batch for tick in ticks for batch in tick]
        with clock.phase("anchor"):
            fired = turn_anchor(parts, rows, step, settings, anchor)
            anchor = fired.staged if fired else anchor
        view = open_view(parts, anchor, step, settings)
        with clock.phase("old"):
            watched = parts.watches_errors
            old = engine.forward(batches, view, with_errors=watched)
            errors_ND = engine.take_errors() if watched else None
        with clock.phase("reference"):
            reference = engine.forward(batches, view, "reference", with_entropy=False)
        refuse_non_finite(logprob_sums(batches, old, reference))
        with clock.phase("probe"):
            probed = probe(parts, step, batches, view, old, reference)
        if fired and fired.gradient is not None:
            engine.merge_anchor(fired.gradient, recipe.anchor.merge_beta)
        learns = any(rows.advantages)
        updates = update(parts, ticks, view, settings, old, reference, clock) if learns else {}
    metrics = rollout_series(scored, rows) | probed.series | updates
    metrics |= {"step/noop": float(not learns), "anchor/fired": float(fired is not None)}
    metrics |= view_series(batches, old)
    metrics |= wire_series(parts, view, batches, fired, 3 if learns else 2, probed.num_tokens)
    metrics |= {f"timing_s/{phase}": seconds for phase, seconds in clock.seconds.items()}
    return StepResult(metrics, anchor, scored, errors_ND)


def is_probed(recipe: Recipe, step: int) -> bool:
    """Steps 1, 1 + every, 1 + 2 every, ..., and the last; never when every is 0."""
    every = recipe.probe.every
    return every > 0 and ((step - 1) % every == 0 or step == recipe.steps)


def probe(
    parts: Parts,
    step: int,
    batches: Sequence[Batch],
    view: View,
    old: Sequence[Reading],
    reference: Sequence[Reading],
) -> Probed:
    """The codec-off readings where they are due."""
    recipe = parts.recipe
    if not is_probed(recipe, step):
        return Probed({})
    probed = dense_probe(parts.engine, batches, view, old, reference, parts.held)
    if parts.held is None or not recipe.probe.greedy:
        return probed
    greedy = greedy_score(parts.work, parts.sampler, parts.held, recipe.sampling)
    return Probed(probed.series | greedy, probed.num_tokens)


def micro_batches(parts: Parts, rows: Rows) -> list[list[Batch]]:
    """The step's mini-batches of micro-batches, in the recipe's sizes."""
    mini_rows, micro_rows = batch_rows(parts.recipe)
    return partition(rows, mini_rows, micro_rows, parts.recipe.rl.length_bucket, parts.engine.device)


def turn_anchor(
    parts: Parts, rows: Rows, step: int, settings: Settings, state: slow.AnchorState
) -> slow.Fired | None:
    """Remember weights a later stale anchor needs, and fire if it is due and of any use."""
    config, engine = parts.recipe.anchor, parts.engine
    if not slow.is_needed(parts.codec, config, engine.num_boundaries):
        return None
    if slow.snapshot_due(step, config, settings.anchor_cadence):
        engine.take_snapshot(step)
    if not (slow.is_due(step, settings.anchor_cadence) or settings.extra_anchor):
        return None
    rl, num_tokens = parts.recipe.rl, parts.recipe.sampling.max_new_tokens
    run_loss = slow.AnchorLoss(rl, settings, num_tokens, batch_rows(parts.recipe)[1])
    return slow.fire(engine, parts.codec, state, rows, step, config, run_loss)


def open_view(parts: Parts, anchor: slow.AnchorState, step: int, settings: Settings) -> View:
    """The one View of this step's passes, out of what is published at its boundary."""
    codec = parts.codec if settings.bits_per_value is None else parts.codec.with_bits(settings.bits_per_value)
    view = publish(codec, anchor.states, parts.recipe.seed, step, parts.engine.device)
    return view.dense() if settings.codec_off else view


def update(
    parts: Parts,
    ticks: Sequence[Sequence[Batch]],
    view: View,
    settings: Settings,
    old: Sequence[Reading],
    reference: Sequence[Reading],
    clock: PhaseClock,
) -> dict[str, float]:
    """One optimizer tick for every mini-batch, all through the same View; actor/* of the step."""
    rl, optimizer = parts.recipe.rl, parts.recipe.optimizer
    rate = optimizer.learning_rate * settings.learning_rate_scale
    applied = UpdateSettings(rate, optimizer.grad_clip, parts.recipe.anchor.merge_alpha)
    terms, shares, norms, start = loss_terms(rl, settings), [], [], 0
    fingerprint = view.fingerprint()
    for tick in ticks:
        span = slice(start, start + len(tick))
        start += len(tick)
        losses = Losses(
            rl,
            terms,
            total_denominator(tick, parts.recipe.sampling.max_new_tokens),
            [reading.logprob_BR for reading in old[span]],
            [reading.logprob_BR for reading in reference[span]],
            [],
        )
        parts.engine.train_step(tick, view, losses)
        with clock.phase("update"):
            outcome = parts.engine.apply_update(applied)
        weights = 0.0 if outcome.weights_finite else math.nan
        refuse_non_finite({"actor/grad_norm": outcome.grad_norm, "actor/weights": weights})
        shares.append(losses.readings)
        norms.append(outcome.grad_norm)
    assert view.fingerprint() == fingerprint, "a codec state was published in mid-step"
    for phase, seconds in parts.engine.take_timings().items():
        clock.add(phase, seconds)
    return mean_over_ticks(shares) | {
        "actor/grad_norm": sum(norms) / len(norms),
        "actor/first_tick_ppo_kl": sum(reading["actor/ppo_kl"] for reading in shares[0]),
        "actor/lr": rate,
        "actor/num_updates": float(len(ticks)),
    }


def logprob_sums(
    batches: Sequence[Batch], old: Sequence[Reading], reference: Sequence[Reading]
) -> Mapping[str, float]:
    """Sums that are finite only if every log-probability is, in the order of the passes."""
    return {
        "rollout_logprobs": float(sum(batch.rollout_logprob_BR.sum() for batch in batches)),
        "old_logprobs": float(sum(reading.logprob_BR.sum() for reading in old)),
        "reference_logprobs": float(sum(reading.logprob_BR.sum() for reading in reference)),
    }


def join(parts_BR: Sequence[Tensor]) -> Tensor:
    """Micro-batches' (B, R) tensors as one, padded at the right with 0 to the longest R."""
    width = max(part.shape[1] for part in parts_BR)
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts_BR])


def view_series(batches: Sequence[Batch], old: Sequence[Reading]) -> dict[str, float]:
    """Readings of the old pass: entropy through the codec, and the mismatch to the dense sampler."""
    mask_BR = join([batch.response_mask_BR for batch in batches])
    old_BR = join([reading.logprob_BR for reading in old])
    rollout_BR = join([batch.rollout_logprob_BR for batch in batches])
    entropy_BR = join([reading.entropy_BR for reading in old])
    num_tokens = max(1, int(mask_BR.sum()))
    return {
        "actor/entropy": float(entropy_BR.sum()) / num_tokens,
        **mismatch_series(rollout_BR, old_BR, mask_BR),
        **gap_means(rollout_BR, old_BR, mask_BR),
    }


def wire_series(
    parts: Parts,
    view: View,
    batches: Sequence[Batch],
    fired: slow.Fired | None,
    num_passes: int,
    num_probe_tokens: int,
) -> dict[str, float]:
    """wire/* of the step: `num_passes` forward passes sent every token (padding included), the last of
    three also backward; the dense tokens of anchor and probe and the published state apart."""
    num_tokens = sum(batch.input_ids_BT.numel() for batch in batches)
    shape = WireShape(
        view.codec.wire_bits(parts.engine.dtype), parts.engine.hidden_dim, parts.engine.num_boundaries
    )
    published = sum(state.num_bytes() for state in fired.staged.states) if fired else 0
    return wire_bytes(
        shape,
        forward_tokens=num_passes * num_tokens,
        backward_tokens=num_tokens if num_passes == 3 else 0,
        anchor_tokens=fired.num_tokens * fired.num_passes if fired else 0,
        probe_tokens=num_probe_tokens,
        side_channel_bytes=published,
    )
