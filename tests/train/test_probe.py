"""The codec-off readings: what each is an estimate of, and that they add up and cost what they say."""

import dataclasses
import json

import pytest
import torch

from tests.train.runs import recipe, run
from tests.train.test_step import start
from thinwire.codecs import publish
from thinwire.instruments.mismatch import gap_means, gap_parts
from thinwire.train.probe import dense_probe
from thinwire.train.step import run_step


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_two_parts_of_the_gap_add_up_to_its_change_at_every_step(tmp_path):
    """1e-12: three float64 means of some hundred values near 3 nats, each exact to 1e-15 relative."""
    run(tmp_path / "a", "--steps=4", codec="subspace")
    first, *later = lines(tmp_path / "a")[1:]
    assert first["probe/gap_policy_part"] == first["probe/gap_view_part"] == 0.0
    for row in later:
        change = row["rollout_corr/kl"] - first["rollout_corr/kl"]
        parts = row["probe/gap_policy_part"] + row["probe/gap_view_part"]
        assert parts == pytest.approx(change, abs=1e-12)
        assert row["probe/gap_policy_part"] != 0.0


def test_a_resumed_run_counts_the_parts_from_step_1_and_holds_the_same_fixed_batch(tmp_path):
    probe = ("--probe.every=1", "--probe.held_prompts=9")
    run(tmp_path / "whole", "--steps=4", *probe)
    run(tmp_path / "cut", "--steps=2", "--checkpoint.every=2", *probe)
    config = tmp_path / "cut" / "config.toml"
    config.write_text(config.read_text().replace("steps = 2", "steps = 4"))
    environment = tmp_path / "cut" / "environment.json"
    known = json.loads(environment.read_text())
    known.pop("recipe_sha256", None)
    environment.write_text(json.dumps(known))
    run(tmp_path / "cut", "--steps=4", "--checkpoint.every=2", *probe, resume=True)
    for key in ("probe/gap_view_part", "probe/held_kl", "probe/kl_gain", "probe/held_entropy"):
        assert lines(tmp_path / "cut")[-1][key] == lines(tmp_path / "whole")[-1][key]


def test_without_training_every_divergence_reads_zero_and_the_gain_is_left_out():
    parts, settings, anchor = start(recipe("--probe.every=1"))
    metrics = run_step(parts, 1, settings, anchor).metrics
    assert metrics["probe/kl_dense"] == metrics["probe/held_kl"] == 0.0
    assert "probe/kl_gain" not in metrics


def test_the_fixed_batch_does_not_move_with_the_weights():
    parts, settings, anchor = start(recipe("--probe.every=1", "--optimizer.learning_rate=1e-3"))
    before = [batch.input_ids_BT.clone() for batch in parts.held.batches]
    first = run_step(parts, 1, settings, anchor).metrics
    second = run_step(parts, 2, settings, anchor).metrics
    assert all(torch.equal(a, b.input_ids_BT) for a, b in zip(before, parts.held.batches, strict=True))
    assert second["probe/held_kl"] > first["probe/held_kl"] == 0.0
    assert second["probe/held_kl"] != second["probe/kl_dense"]


def test_the_fixed_batch_estimates_the_divergence_it_names():
    """E_ref[e^d - d - 1] over ALL next tokens, weighted by pi_ref, is KL(ref || current): the estimator's
    direction is checked against the exact sum at one position, d = log pi_t - log pi_ref. float64, 1e-12."""
    generator = torch.Generator().manual_seed(0)
    ref, now = (torch.randn(50, generator=generator).double().log_softmax(0) for _ in range(2))
    difference = now - ref
    estimate = (ref.exp() * (difference.exp() - difference - 1)).sum()
    assert float(estimate) == pytest.approx(float((ref.exp() * (ref - now)).sum()), abs=1e-12)


def test_the_probe_counts_its_dense_passes():
    parts, settings, anchor = start(recipe("--probe.every=1", "--probe.held_prompts=5"))
    step = run_step(parts, 1, settings, anchor).metrics
    per_token = 2 * 128 * 2
    held = sum(batch.input_ids_BT.numel() for batch in parts.held.batches)
    rollouts = step["wire/dense_bytes"] / (4 * per_token)
    assert step["wire/probe_bytes"] == per_token * 2 * (rollouts + held)
    assert run_step(parts, 1, settings, anchor).metrics["wire/probe_bytes"] == step["wire/probe_bytes"]


def test_no_validation_problems_means_no_fixed_batch():
    parts, settings, anchor = start(recipe("--probe.every=1", "--task.num_validation=0"))
    assert parts.held is None
    assert "probe/held_kl" not in run_step(parts, 1, settings, anchor).metrics


def test_the_gain_is_the_codec_view_reading_over_the_dense_one():
    parts, settings, anchor = start(recipe("--probe.every=1", "--optimizer.learning_rate=1e-3"))
    run_step(parts, 1, settings, anchor)
    batches = parts.held.batches
    view = publish(parts.codec, anchor.states, 1, 2)
    old, reference = parts.engine.forward(batches, view), parts.engine.forward(batches, view, "reference")
    through_codec = dense_probe(parts.engine, batches, view, old, reference, None).series
    off = [parts.engine.forward(batches, view.dense(), policy) for policy in ("current", "reference")]
    same = dense_probe(parts.engine, batches, view, *off, None).series
    assert same["probe/kl_gain"] == pytest.approx(1.0, rel=1e-6)  # fp32 k3 summed twice in the same order
    assert through_codec["probe/kl_gain"] != same["probe/kl_gain"]


def test_a_step_without_response_tokens_has_no_parts():
    empty = torch.zeros(2, 3)
    assert gap_means(empty, empty, empty.bool()) == {}
    assert gap_parts({}, {"probe/rollout_logprob": 0.0, "probe/old_logprob": 0.0}) == {}


def test_parts_are_frozen_values():
    parts, *_ = start(recipe("--probe.every=1"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        parts.held.batches = []
