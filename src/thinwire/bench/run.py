"""`thinwire codecs bench`: every codec on the same tokens of one model, as one JSON object."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.bench import cost
from thinwire.bench.errors import Spectrum, boundary_errors, spectra
from thinwire.bench.gradients import GRADIENT_KEYS, GradientReading
from thinwire.bench.measure import CONFIDENCE, NUM_RESAMPLES, TokenReadings, summarise
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
    refused: list[dict[str, Any]] = []
    rows = [row for entry in plan.entries for row in _tried(_measure, scene, entry, refused)]
    if not rows:
        raise RunFailure(f"codec {refused[0]['label']}: {refused[0]['reason']}")
    rows.sort(key=lambda row: float(row["gap"]["mean"]))
    points = [row for entry in plan.sweep for row in _tried(_point, scene, entry, refused)]
    return {**_setting(scene), "codecs": rows, "sweep": points, "refused": refused}


def _tried(
    measure: Callable[[_Scene, Entry], dict[str, Any]],
    scene: _Scene,
    entry: Entry,
    refused: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The entry's row; none, and a reason, where its forward pass is not finite: that is a reading too, and
    the other codecs go on."""
    started, bits = time.perf_counter(), _bits(scene, entry.codec)
    try:
        row = measure(scene, entry)
    except NonFinite as error:
        refused.append({"label": entry.label, "bits_per_value": bits, "reason": f"not finite: {error}"})
        scene.say(f"{entry.label}: {refused[-1]['reason']}")
        return []
    gap, seconds = row["gap"]["mean"], time.perf_counter() - started
    scene.say(f"{entry.label} at {bits:.3g} bits a value: gap {gap:.4g} nats ({seconds:.0f} s)")
    return [row]


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


def _measure(scene: _Scene, entry: Entry) -> dict[str, Any]:
    codec, plan, first = entry.codec, scene.plan, scene.passes[0]
    states = learn_states(codec, scene)
    views = views_of(codec, states, scene, plan.draws)
    readings, gradient = _read(scene, views)
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
        "gradient": gradient,
        "boundaries": [
            {"after_block": block, **both}
            for block, both in zip(scene.subject.stages.after, errors, strict=True)
        ],
        "side_channel": cost.side_channel(views[0].states, plan.cadence, _tokens_per_step(scene)),
        "microseconds_per_token": cost.microseconds(scene.subject, views[0], first),
    }


def _read(scene: _Scene, views: Sequence[View]) -> tuple[list[TokenReadings], dict[str, Any]]:
    """Every draw's readings, and the gradients'. Where a gradient is not finite (a run would refuse that
    step), `not_finite` says where, and no more gradients are taken."""
    readings, gradients = [], GradientReading(scene.gradient)
    not_finite: str | None = None
    for view in views:
        if not_finite is None:
            try:
                seen, gradient = view_pass(scene.subject, scene.passes, view, with_gradient=True)
                gradients.add_(gradient)
            except NonFinite as error:
                if error.series.endswith("/forward"):
                    raise
                not_finite = error.series
        if not_finite is not None:
            seen, _ = view_pass(scene.subject, scene.passes, view, with_gradient=False)
        readings.append(seen)
    found = dict.fromkeys(GRADIENT_KEYS) if not_finite else gradients.finish()
    return readings, {**found, "not_finite": not_finite}


def _point(scene: _Scene, entry: Entry) -> dict[str, Any]:
    """One point of the sweep: gap, KL and entropy of one draw, and the bits."""
    states = learn_states(entry.codec, scene)
    (view,) = views_of(entry.codec, states, scene, 1)
    seen, _ = view_pass(scene.subject, scene.passes, view, with_gradient=False)
    return {
        "label": entry.label,
        "settings": _settings(entry.codec),
        "bits_per_value": _bits(scene, entry.codec),
        **summarise([seen], scene.sequence_N, scene.plan.seed),
    }


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
