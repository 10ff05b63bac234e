"""The slow circuit: cadence, delay, staging, token share, merge, and what it must not touch."""

import pytest
import torch

from tests.train.runs import recipe
from tests.train.test_step import start, weights
from thinwire.train import anchor as slow
from thinwire.train.anchor import AnchorConfig, is_due, snapshot_due
from thinwire.train.step import open_view, run_step


def test_it_fires_before_step_one_and_then_every_cadence_steps():
    assert [step for step in range(1, 46) if is_due(step, 20)] == [1, 21, 41]
    assert [step for step in range(1, 5) if is_due(step, 1)] == [1, 2, 3, 4]


def test_snapshots_are_taken_where_a_later_fire_needs_them():
    config = AnchorConfig(cadence=20, delay=5)
    assert [step for step in range(1, 46) if snapshot_due(step, config, 20)] == [1, 16, 36]
    assert not any(snapshot_due(step, AnchorConfig(), 20) for step in range(1, 46))


def run_steps(rec, num):
    parts, settings, anchor = start(rec)
    results = []
    for step in range(1, num + 1):
        results.append(run_step(parts, step, settings, anchor))
        anchor = results[-1].anchor
    return parts, results


def test_a_basis_stays_fixed_between_fires_and_serves_from_the_step_that_fired():
    _, results = run_steps(recipe("--anchor.cadence=2", codec="subspace"), 4)
    prints = [result.anchor.states[0].fingerprint() for result in results]
    assert prints[0] == prints[1] != prints[2] == prints[3]
    assert [result.metrics["anchor/fired"] for result in results] == [1.0, 0.0, 1.0, 0.0]
    assert [state.version for state in results[3].anchor.states] == [2, 2]


def test_a_codec_that_learns_nothing_never_pays_for_an_anchor():
    _, results = run_steps(recipe("--anchor.cadence=1"), 2)
    assert all(result.metrics["anchor/fired"] == 0.0 for result in results)


def test_the_anchor_leaves_weights_rollouts_and_random_state_alone():
    """Dense passes and learning in between change nothing that a run of the identity codec would see."""
    torch.manual_seed(5)
    parts, settings, anchor = start(recipe(codec="subspace"))
    random, before = torch.get_rng_state(), weights(parts)
    result = run_step(parts, 1, settings, anchor)
    rows = slow.Rows(
        result.scored.rollouts.prompt_ids,
        result.scored.rollouts.response_ids,
        result.scored.rollouts.logprobs,
        result.scored.rollouts.sample,
        [0.0] * 16,
    )
    state = {name: t.clone() for name, t in parts.engine.state().items()}
    loss = slow.AnchorLoss(parts.recipe.rl, settings, 5, 8)
    slow.fire(parts.engine, parts.codec, result.anchor, rows, 1, parts.recipe.anchor, loss)
    assert all(torch.equal(t, state[name]) for name, t in parts.engine.state().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert before.keys() == weights(parts).keys()


def test_a_stale_anchor_sees_the_weights_of_delay_steps_ago():
    """With delay 1 and cadence 1, step 2 learns from step 1's weights: its basis comes from them, and so
    differs from the basis a current anchor learns on the same rollouts."""
    fresh = run_steps(recipe("--anchor.cadence=1", "--optimizer.learning_rate=1e-3", codec="subspace"), 2)[1]
    stale = run_steps(
        recipe("--anchor.cadence=1", "--anchor.delay=1", "--optimizer.learning_rate=1e-3", codec="subspace"),
        2,
    )[1]
    same = [
        f.anchor.states[0].fingerprint() == s.anchor.states[0].fingerprint()
        for f, s in zip(fresh, stale, strict=True)
    ]
    assert same == [True, False]


def test_a_share_of_the_tokens_costs_that_share_of_the_traffic():
    whole = run_steps(recipe(codec="subspace"), 1)[1][0].metrics["wire/anchor_bytes"]
    part = run_steps(recipe("--anchor.token_share=0.25", codec="subspace"), 1)[1][0].metrics[
        "wire/anchor_bytes"
    ]
    assert 0 < part <= 0.3 * whole


def test_the_side_channel_is_the_bases_once_a_fire():
    _, results = run_steps(recipe("--anchor.cadence=2", codec="subspace"), 2)
    assert [r.metrics["wire/side_channel_bytes"] for r in results] == [2 * 128 * 6 * 4, 0.0]


def test_a_merged_anchor_gradient_costs_a_backward_and_changes_the_update():
    plain, _ = run_steps(recipe("--anchor.cadence=1"), 1)
    merged, results = run_steps(recipe("--anchor.cadence=1", "--anchor.merge_alpha=0.5"), 1)
    assert results[0].metrics["anchor/fired"] == 1.0
    tokens = results[0].metrics["wire/dense_bytes"] / (4 * 2 * 128 * 2)
    assert results[0].metrics["wire/anchor_bytes"] == 3 * 2 * 128 * 2 * tokens
    differs = [
        not torch.equal(a, b) for a, b in zip(weights(plain).values(), weights(merged).values(), strict=True)
    ]
    assert any(differs)


def test_the_anchors_gradient_is_that_of_the_dense_loss():
    """M after one fire is (1 - beta) times the gradient of a dense tick on the same rows; fp32 sums, 1e-6."""
    rec = recipe("--anchor.merge_alpha=0.5", "--anchor.merge_beta=0.5", "--rl.mini_batch_prompts=0")
    parts, settings, anchor = start(rec)
    result = run_step(parts, 1, settings, anchor)
    average = {
        n.removeprefix("anchor_average."): t for n, t in parts.engine.state().items() if "average" in n
    }
    twin, settings, anchor = start(recipe("--rl.mini_batch_prompts=0", codec="identity"))
    grads = {}
    twin.engine.apply_update = lambda settings: (
        grads.update({n: p.grad.clone() for n, p in twin.engine.model.named_parameters()}),
        type("U", (), {"grad_norm": 1.0, "applied": True, "weights_finite": True})(),
    )[1]
    dense = run_step(twin, 1, settings, anchor)
    assert dense.scored.rollouts.response_ids == result.scored.rollouts.response_ids
    for name, gradient in grads.items():
        torch.testing.assert_close(average[name], 0.5 * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "field", ["cadence=0", "delay=-1", "token_share=0", "token_share=1.5", "merge_alpha=2"]
)
def test_settings_out_of_range_are_refused_by_name(field):
    name = field.split("=")[0]
    with pytest.raises(ValueError, match=f"anchor.{name}"):
        recipe(f"--anchor.{field}")


def test_a_view_is_made_of_published_states_only():
    parts, settings, anchor = start(recipe(codec="subspace"))
    view = open_view(parts, anchor, 1, settings)
    fired = run_step(parts, 1, settings, anchor)
    assert view.states == anchor.states
    assert fired.anchor.states != anchor.states
