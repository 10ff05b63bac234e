"""The step: dense control equal to plain GRPO, one View for all passes, a dense sampler, no-op steps."""

import dataclasses

import pytest
import torch

from tests.train.runs import recipe
from thinwire.codecs import Identity
from thinwire.control import Settings
from thinwire.core.errors import NonFinite
from thinwire.core.records import SERIES
from thinwire.models.load import load_model
from thinwire.rl.advantages import group_advantages
from thinwire.rl.kl import kl_estimate
from thinwire.rl.logprobs import logprobs_and_entropy
from thinwire.rl.policy_loss import policy_loss
from thinwire.sampling.hf import HFSampler
from thinwire.tasks.base import make_task
from thinwire.tasks.prompts import encode_prompt
from thinwire.tasks.rewards import make_reward
from thinwire.train import step as step_module
from thinwire.train.anchor import initial_anchor_state
from thinwire.train.losses import initial_settings
from thinwire.train.parts import build
from thinwire.train.step import run_step


def start(rec):
    parts = build(rec, load_model(rec.model))
    anchor = initial_anchor_state(parts.codec, parts.engine.num_boundaries, rec.seed)
    return parts, initial_settings(rec.rl, rec.anchor.cadence), anchor


def weights(parts):
    return {name: p.detach().clone() for name, p in parts.engine.model.named_parameters()}


def plain_grpo(rec):
    """GRPO written without engine, stages, views or codecs: the model's own forward, one AdamW."""
    loaded, base = load_model(rec.model), load_model(rec.model)
    model, reference = loaded.model, base.model
    sampler = HFSampler(model, loaded.eos_ids, loaded.pad_id)
    task, reward = make_task(rec.task, rec.seed), make_reward(rec.task.reward)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rec.optimizer.learning_rate, weight_decay=0.01, fused=True
    )

    def logprobs(net, ids, at, target):
        hidden = net.model(input_ids=ids, use_cache=False).last_hidden_state
        return logprobs_and_entropy(hidden[:, at], net.lm_head, target)[0]

    for step in range(1, rec.steps + 1):
        problems = task.prompts(step, rec.sampling.prompts)
        prompts = [encode_prompt(loaded.tokenizer, problem, rec.task) for problem in problems]
        size = rec.sampling.group_size
        out = sampler.sample(prompts, seed=rec.seed, step=step, group_size=size, config=rec.sampling)
        texts = [loaded.tokenizer.decode(ids, skip_special_tokens=True) for ids in out.response_ids]
        scores = torch.tensor([reward(problems[i // size], text).value for i, text in enumerate(texts)])
        advantage = group_advantages(scores, size)
        length = max(len(p) + len(r) for p, r in zip(out.prompt_ids, out.response_ids, strict=True))
        width = -(-length // rec.rl.length_bucket) * rec.rl.length_bucket
        ids = torch.tensor(
            [(p + r + [0] * width)[:width] for p, r in zip(out.prompt_ids, out.response_ids, strict=True)]
        )
        start_at = len(out.prompt_ids[0])
        slots = max(len(r) for r in out.response_ids)
        mask = torch.arange(slots)[None] < torch.tensor([len(r) for r in out.response_ids])[:, None]
        row, slot = mask.nonzero(as_tuple=True)
        at, target = (row, start_at + slot - 1), ids[row, start_at + slot]

        def read(net, ids=ids, at=at, target=target, row=row, slot=slot, shape=mask.shape):
            hidden = net.model(input_ids=ids, use_cache=False).last_hidden_state
            values, _ = logprobs_and_entropy(hidden[at], net.lm_head, target)
            return values.new_zeros(shape).index_put((row, slot), values)

        with torch.no_grad():
            old, ref = read(model), read(reference)
        new = read(model)
        loss = policy_loss(new, old, advantage, mask).loss_BR.sum() / mask.sum()
        loss = loss + rec.rl.kl_coefficient * kl_estimate(new, ref, mask, "k3").value_BR.sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(model.named_parameters())


def test_the_dense_control_equals_plain_grpo_bit_for_bit():
    """Three steps; grad_clip is out of reach, so clipping multiplies by exactly 1."""
    rec = recipe(
        "--rl.mini_batch_prompts=0", "--rl.micro_batch_rows=0", "--optimizer.grad_clip=1e9", codec="identity"
    )
    parts, settings, anchor = start(rec)
    for step in range(1, rec.steps + 1):
        anchor = run_step(parts, step, settings, anchor).anchor
    plain = plain_grpo(rec)
    initial = dict(load_model(rec.model).model.named_parameters())
    for name, own in weights(parts).items():
        assert torch.equal(own, plain[name]), name
    assert any(not torch.equal(own, initial[name]) for name, own in weights(parts).items())


def test_the_sampler_sees_the_dense_model_whatever_the_codec():
    """Step 1 of every codec draws the same tokens with the same log-probabilities; the old pass does not."""
    results = {}
    for codec in ("identity", "exact-k", "subspace"):
        parts, settings, anchor = start(recipe(codec=codec))
        results[codec] = run_step(parts, 1, settings, anchor)
    rollouts = [result.scored.rollouts for result in results.values()]
    assert all(r.response_ids == rollouts[0].response_ids for r in rollouts)
    assert all(r.logprobs == rollouts[0].logprobs for r in rollouts)
    assert abs(results["identity"].metrics["rollout_corr/kl"]) < 1e-5  # teacher forcing in fp32
    assert results["exact-k"].metrics["rollout_corr/kl"] > 0.1


def test_old_reference_and_train_pass_share_one_draw():
    """At step 1 the weights are the reference's: through one draw the first tick's KL is exactly 0."""
    parts, settings, anchor = start(recipe("--rl.mini_batch_prompts=0"))
    metrics = run_step(parts, 1, settings, anchor).metrics
    assert metrics["actor/kl_loss"] == metrics["actor/kl_unclamped"] == 0.0
    assert metrics["actor/first_tick_ppo_kl"] == metrics["actor/pg_clipfrac"] == 0.0


def test_a_state_published_in_mid_step_stops_the_step(monkeypatch):
    """A View is a value; whoever mutates the tensors behind it during a step is caught."""
    parts, settings, anchor = start(recipe(codec="subspace"))
    real = parts.engine.train_step

    def publish_in_mid_step(batches, view, loss):
        view.states[0].tensors["basis_DR"].add_(1.0)
        return real(batches, view, loss)

    monkeypatch.setattr(parts.engine, "train_step", publish_in_mid_step)
    with pytest.raises(AssertionError, match="mid-step"):
        run_step(parts, 1, settings, anchor)


def test_a_probe_changes_no_bit_of_a_run():
    outcomes = []
    for every in (0, 1):
        probe = (f"--probe.every={every}", "--probe.greedy=true", "--probe.held_prompts=7")
        parts, settings, anchor = start(recipe(*probe, codec="subspace"))
        for step in (1, 2):
            result = run_step(parts, step, settings, anchor)
            anchor = result.anchor
        outcomes.append((weights(parts), result.metrics))
    assert all(
        torch.equal(a, b) for a, b in zip(outcomes[0][0].values(), outcomes[1][0].values(), strict=True)
    )
    assert "probe/kl_dense" in outcomes[1][1]
    assert "probe/kl_dense" not in outcomes[0][1]


def test_equal_rewards_in_every_group_make_a_counted_step_without_update(monkeypatch):
    parts, settings, anchor = start(recipe())
    monkeypatch.setattr(parts.work.task, "prompts", lambda step, num: [wrong(p) for p in real(step, num)])
    real = type(parts.work.task).prompts.__get__(parts.work.task)
    before = weights(parts)
    metrics = run_step(parts, 1, settings, anchor).metrics
    assert metrics["step/noop"] == 1.0
    assert metrics["groups/all_equal_count"] == 4.0
    assert "actor/grad_norm" not in metrics
    assert metrics["wire/backward_bytes"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in weights(parts).items())


def wrong(problem):
    return dataclasses.replace(problem, answer="99999")


def test_weights_that_are_not_finite_refuse_the_step_and_name_the_first_series():
    parts, settings, anchor = start(recipe())
    with torch.no_grad():
        parts.engine.model.model.layers[5].mlp.down_proj.weight.fill_(torch.inf)
    with pytest.raises(NonFinite, match="rollout_logprobs"):
        run_step(parts, 1, settings, anchor)


def test_a_gradient_that_is_not_finite_refuses_the_update(monkeypatch):
    parts, settings, anchor = start(recipe("--rl.mini_batch_prompts=0"))
    before = weights(parts)
    real = parts.engine.train_step

    def spoil(batches, view, loss):
        losses = real(batches, view, loss)
        parts.engine.model.lm_head.weight.grad[0, 0] = torch.nan
        return losses

    monkeypatch.setattr(parts.engine, "train_step", spoil)
    with pytest.raises(NonFinite, match="actor/grad_norm"):
        run_step(parts, 1, settings, anchor)
    assert all(torch.equal(p, before[name]) for name, p in weights(parts).items())


@pytest.mark.parametrize("codec", ["identity", "exact-k", "subspace"])
def test_every_series_of_a_step_is_declared(codec):
    parts, settings, anchor = start(recipe("--probe.every=1", "--probe.greedy=true", codec=codec))
    result = run_step(parts, 1, settings, anchor)
    metrics = run_step(parts, 2, settings, result.anchor).metrics
    added_by_the_loop = {
        "step",
        "val/score",
        "timing_s/validation",
        "memory/peak_rss_bytes",
        "codec/version",
        "probe/gap_policy_part",
        "probe/gap_view_part",
        "timing_s/movement",
    }
    added_by_the_loop |= {
        series.key
        for series in SERIES
        if series.key.startswith(("controller/", "error_growth/", "movement/"))
    }
    assert set(metrics) | added_by_the_loop == {series.key for series in SERIES}


def test_wire_bytes_are_counted_from_shapes_and_true_bits():
    """4 x 4 rows, two boundaries, 6 values of 2 bytes; three forward passes and one backward."""
    parts, settings, anchor = start(recipe())
    metrics = run_step(parts, 1, settings, anchor).metrics
    tokens = metrics["wire/dense_bytes"] / (4 * 2 * 128 * 2)
    assert tokens % 4 == 0
    assert metrics["wire/forward_bytes"] == 3 * tokens * 2 * 12
    assert metrics["wire/backward_bytes"] == tokens * 2 * 12
    assert metrics["wire/anchor_bytes"] == metrics["wire/side_channel_bytes"] == 0.0
    assert metrics["wire/bits_per_value"] == 96 / 128


def test_codec_off_settings_make_a_step_dense():
    parts, settings, anchor = start(recipe())
    metrics = run_step(parts, 1, dataclasses.replace(settings, codec_off=True), anchor).metrics
    assert abs(metrics["rollout_corr/kl"]) < 1e-5


def test_the_view_alignment_term_raises_the_views_logprobability_of_the_samplers_tokens():
    """One tick on the alignment term alone, then the same rows again: the gap is smaller than before."""
    parts, settings, anchor = start(recipe("--rl.mini_batch_prompts=0", "--optimizer.learning_rate=1e-3"))
    only = Settings(kl_coefficient=0.0, view_alignment_weight=1000.0, anchor_cadence=20)
    before = run_step(parts, 1, only, anchor).metrics["rollout_corr/kl"]
    rows = step_module.to_rows(run_step(parts, 1, settings, anchor).scored, True)
    batches = [b for tick in step_module.micro_batches(parts, rows) for b in tick]
    view = step_module.open_view(parts, anchor, 1, settings)
    after = step_module.view_series(batches, parts.engine.forward(batches, view))["rollout_corr/kl"]
    assert after < before
    assert not isinstance(view.codec, Identity)
