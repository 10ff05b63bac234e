"""`thinwire codecs bench`: every codec on the same tokens of one model, as one JSON object."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.bench import cost
from thinwire.bench.errors import Spectrum, boundary_errors, spectra
from thinwire.bench.gradients import GradientReading
from thinwire.bench.measure import CONFIDENCE, NUM_RESAMPLES, summarise
from thinwire.bench.passes import LOSS, Dense, Subject, dense_passes, view_pass
from thinwire.bench.plan import Entry, Plan, Say, learn_state
from thinwire.bench.rollouts import micro_batches, num_tokens
from thinwire.bench.store import Saved
from thinwire.codecs import Codec, CodecState, View, publish
from thinwire.core.errors import NonFinite, RunFailure, UserError


@dataclass(frozen=True)
class _Scene:
    """Everything that codecs share: the model, its statistics and its dense passes over the scored rows."""

    subject: Subject
    plan: Plan
    saved: Saved
    passes: list[Dense]
    gradient: list[Tensor]
    spectra: list[dict[str, Spectrum]]
    sequence_N: Tensor
    say: Say = field(repr=False)


def bench(subject: Subject, saved: Saved, plan: Plan, say: Say) -> dict[str, Any]:
    """The readings of every codec of the plan, sorted by gap, as one JSON object."""
    subject = subject.at(float(saved.facts["temperature"]))
    say(f"dense passes over {len(saved.sampled.scored.sample)} rollouts")
    passes, gradient = dense_passes(subject, micro_batches(saved.sampled.scored, subject.device))
    scene = _Scene(subject, plan, saved, passes, gradient, spectra(passes), _sequences(passes), say)
    if not any(bool(g.any()) for g in gradient):
        raise UserError("the scored rollouts give a gradient of 0: raise --rollouts or --max-new-tokens")
    rows = [_measured(scene, entry) for entry in plan.entries]
    rows.sort(key=lambda row: float(row["gap"]["mean"]))
    return {**_setting(scene), "codecs": rows, "sweep": [_point(scene, entry) for entry in plan.sweep]}


def learn_states(codec: Codec, scene: _Scene) -> list[CodecState]:
    """Each boundary's state after the plan's fires on the saved moments."""
    moments = zip(scene.saved.forward, scene.saved.backward, strict=True)
    return [
        learn_state(codec, b, forward, backward, scene.plan.fires, scene.plan.seed)
        for b, (forward, backward) in enumerate(moments)
    ]


def views_of(codec: Codec, states: Sequence[CodecState], scene: _Scene, num_draws: int) -> list[View]:
    """Views of steps 1..num_draws; one where the codec draws nothing."""
    device = scene.subject.device
    views = [publish(codec, states, scene.plan.seed, step + 1, device) for step in range(num_draws)]
    is_drawn = views[0].draw(0, scene.passes[0].batch.sample_B[:1], 1) is not None
    return views if is_drawn else views[:1]


def _measured(scene: _Scene, entry: Entry) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        row = _measure(scene, entry)
    except NonFinite as error:
        raise RunFailure(f"codec {entry.label}: {error}") from error
    scene.say(f"{entry.label}: gap {row['gap']['mean']:.4g} nats ({time.perf_counter() - started:.0f} s)")
    return row


def _measure(scene: _Scene, entry: Entry) -> dict[str, Any]:
    codec, plan, first = entry.codec, scene.plan, scene.passes[0]
    states = learn_states(codec, scene)
    views = views_of(codec, states, scene, plan.draws)
    readings, gradients = [], GradientReading(scene.gradient)
    for view in views:
        seen, gradient = view_pass(scene.subject, scene.passes, view, with_gradient=True)
        readings.append(seen)
        gradients.add_(gradient)
    wire = cost.wire_bits(views[0], first)
    errors = boundary_errors(views, scene.passes)
    for spectrum, both in zip(scene.spectra, errors, strict=True):
        for direction, reading in both.items():
            reading["gaussian_reference"] = spectrum[direction].reference(wire[direction])
    return {
        "label": entry.label,
        "settings": _settings(codec),
        "bits_per_token": wire,
        "bits_per_value": max(wire.values()) / codec.hidden_dim,
        "num_draws": len(views),
        **summarise(readings, scene.sequence_N, plan.seed),
        "gradient": gradients.finish(),
        "boundaries": [
            {"after_block": block, **both}
            for block, both in zip(scene.subject.stages.after, errors, strict=True)
        ],
        "side_channel": cost.side_channel(views[0].states, plan.cadence, _tokens_per_step(scene)),
        "microseconds_per_token": cost.microseconds(scene.subject, views[0], first),
    }


def _point(scene: _Scene, entry: Entry) -> dict[str, Any]:
    """One point of the sweep: gap, KL and entropy of one draw, and the bits."""
    codec, plan = entry.codec, scene.plan
    states = learn_states(codec, scene)
    (view,) = views_of(codec, states, scene, 1)
    try:
        seen, _ = view_pass(scene.subject, scene.passes, view, with_gradient=False)
    except NonFinite as error:
        raise RunFailure(f"codec {entry.label} at {_bits(scene, codec):g} bits a value: {error}") from error
    bits, readings = _bits(scene, codec), summarise([seen], scene.sequence_N, plan.seed)
    scene.say(f"{entry.label} at {bits:.3g} bits a value: gap {readings['gap']['mean']:.4g} nats")
    return {"label": entry.label, "settings": _settings(codec), "bits_per_value": bits, **readings}


def _bits(scene: _Scene, codec: Codec) -> float:
    return codec.wire_bits_per_value(scene.subject.dtype)


def _settings(codec: Codec) -> dict[str, Any]:
    return codec.model_dump(mode="json", exclude={"hidden_dim"}, exclude_none=True)


def _sequences(passes: Sequence[Dense]) -> Tensor:
    """The sample index of every scored response token."""
    return torch.cat([dense.batch.sample_B[dense.responses.row_N] for dense in passes])


def _tokens_per_step(scene: _Scene) -> int:
    scored = scene.saved.sampled.scored
    return scene.plan.tokens_per_step or round(256 * num_tokens(scored) / len(scored.sample))


def _setting(scene: _Scene) -> dict[str, Any]:
    """What the readings depend on besides the codecs."""
    plan, sampled = scene.plan, scene.saved.sampled
    return {
        "model": dict(scene.saved.facts),
        "scored": {
            "rollouts": len(sampled.scored.sample),
            "tokens": num_tokens(sampled.scored),
            "response_tokens": len(scene.sequence_N),
        },
        "statistics": {
            "rollouts": len(sampled.statistics.sample),
            "tokens": scene.saved.forward[0].num_tokens,
            "fires": plan.fires,
        },
        "seed": plan.seed,
        "loss": LOSS,
        "interval": f"{CONFIDENCE:.0%}, percentile bootstrap over sequences, {NUM_RESAMPLES} resamples",
        "cadence": plan.cadence,
        "tokens_per_step": _tokens_per_step(scene),
    }
