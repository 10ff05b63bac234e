"""The slow circuit: a codec-off pass that gives the codecs their statistics and, if asked, a gradient.

It fires before a step's old pass. What it learns is staged as a value and enters the run only through
the View that `publish` makes at that step boundary; it touches neither optimizer state, random state
nor rollouts, except through the merge.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from thinwire.codecs import Codec, CodecState, View, publish
from thinwire.control import Settings
from thinwire.engines.base import Engine, Policy
from thinwire.engines.batch import Batch, Rows, partition
from thinwire.train.losses import (
    Losses,
    RlConfig,
    loss_terms,
    refuse_non_finite,
    total_denominator,
)


class AnchorConfig(BaseModel):
    """When the anchor fires, on which weights, and what it gives."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cadence: int = Field(20, ge=1)
    """Rollout steps between fires; the first fire is before step 1."""
    delay: int = Field(0, ge=0)
    """Age in rollout steps of the weights it runs on (0 = current)."""
    token_share: float = Field(1.0, gt=0, le=1)
    """Share of the step's rows it looks at, spread evenly over the prompts."""
    merge_alpha: float = Field(1.0, ge=0, le=1)
    """alpha of G = alpha G_fast + (1 - alpha) |G_fast| sign(M); 1 = off."""
    merge_beta: float = Field(0.9, ge=0, lt=1)
    """beta of M <- beta M + (1 - beta) G_anchor."""


@dataclass(frozen=True)
class AnchorState:
    """What the anchor has learned: one codec state a boundary, and how often it has fired."""

    states: tuple[CodecState, ...]
    num_fires: int = 0


@dataclass(frozen=True)
class Fired:
    """Outcome of one fire: the staged state, the staged gradient, and what crossed uncompressed."""

    staged: AnchorState
    gradient: tuple[Tensor, ...] | None
    num_tokens: int
    num_passes: int
    """Dense crossings of every token, see `num_dense_passes`."""


def initial_anchor_state(codec: Codec, num_boundaries: int, seed: int) -> AnchorState:
    """States before the first fire."""
    return AnchorState(tuple(codec.initial_state(seed, boundary) for boundary in range(num_boundaries)))


def is_due(step: int, cadence: int) -> bool:
    """Fires before steps 1, 1 + cadence, 1 + 2 cadence, ..."""
    return (step - 1) % cadence == 0


def is_needed(codec: Codec, config: AnchorConfig, num_boundaries: int) -> bool:
    """Whether a fire would change anything: a boundary with a codec that learns, or a merged gradient."""
    return (codec.learns and num_boundaries > 0) or config.merge_alpha < 1.0


def num_dense_passes(codec: Codec, config: AnchorConfig, kl_coefficient: float) -> int:
    """Dense crossings of every token at a fire: a forward; its backward where the gradient is merged or the
    codec learns from it; with a merged KL term the reference's forward."""
    if config.merge_alpha < 1.0:
        return 2 + (kl_coefficient > 0)
    return 2 if codec.learns_from_gradients else 1


def snapshot_due(step: int, config: AnchorConfig, cadence: int) -> bool:
    """Whether a fire at step + delay will need the weights of this step's start."""
    return config.delay > 0 and (is_due(step + config.delay, cadence) or step == 1)


@dataclass(frozen=True)
class AnchorLoss:
    """What the anchor needs to take the run's own loss: its configuration and the step's settings."""

    rl: RlConfig
    settings: Settings
    norm_tokens: int
    micro_batch_rows: int


def fire(
    engine: Engine,
    codec: Codec,
    state: AnchorState,
    rows: Rows,
    step: int,
    config: AnchorConfig,
    run_loss: AnchorLoss,
) -> Fired:
    """One codec-off pass on weights `delay` steps old (those of step 1 while the run is younger)."""
    policy: Policy = "current"
    if config.delay > 0:
        engine.use_snapshot(max(1, step - config.delay))
        policy = "snapshot"
    batches = _share_of_rows(engine, rows, config.token_share, run_loss)
    view = publish(codec, state.states, seed=0, step=step, device=engine.device).dense()
    merges = config.merge_alpha < 1.0
    num_passes = num_dense_passes(codec, config, run_loss.settings.kl_coefficient)
    if not merges:  # statistics alone: the KL term's share of the gradient is not worth a reference pass
        run_loss = replace(run_loss, settings=replace(run_loss.settings, kl_coefficient=0.0))
    loss = _own_loss(engine, batches, view, run_loss) if num_passes > 1 else None
    reading = engine.boundary_moments(batches, view, policy, loss)
    if reading.gradient is not None:
        refuse_non_finite({"anchor/gradient": float(sum(share.abs().sum() for share in reading.gradient))})
    version = state.num_fires + 1
    backward = reading.gradient_moments or (None,) * len(reading.moments)
    learned = zip(state.states, reading.moments, backward, strict=True)
    staged = AnchorState(tuple(codec.learn(old, seen, version, back) for old, seen, back in learned), version)
    return Fired(staged, reading.gradient if merges else None, reading.num_tokens, num_passes)


def _share_of_rows(engine: Engine, rows: Rows, share: float, run_loss: AnchorLoss) -> list[Batch]:
    """ceil(share x rows) rows, evenly spaced, in micro-batches of the size that training uses."""
    num_rows = len(rows.sample)
    num_chosen = math.ceil(share * num_rows)
    chosen = [index * num_rows // num_chosen for index in range(num_chosen)]
    part = Rows(*([values[i] for i in chosen] for values in _columns(rows)))
    (tick,) = partition(part, num_chosen, run_loss.micro_batch_rows, run_loss.rl.length_bucket, engine.device)
    return tick


def _columns(rows: Rows) -> list[Sequence[Any]]:
    return [rows.prompt_ids, rows.response_ids, rows.rollout_logprobs, rows.sample, rows.advantages]


def _own_loss(engine: Engine, batches: list[Batch], view: View, run_loss: AnchorLoss) -> Losses:
    """The run's own loss, codec off, with the pass's own detached log-probabilities as old. Without a KL
    term nothing depends on the reference, and its dense pass is saved."""
    has_kl = run_loss.settings.kl_coefficient > 0
    reference = engine.forward(batches, view, "reference", with_entropy=False) if has_kl else None
    return Losses(
        run_loss.rl,
        loss_terms(run_loss.rl, run_loss.settings),
        total_denominator(batches, run_loss.norm_tokens),
        None,
        None if reference is None else [reading.logprob_BR for reading in reference],
        [],
    )
