"""The one-process engine: exact ratios, equal gradients, untouched state, refused updates."""

import math

import pytest
import torch

from tests.engines import helpers
from tests.tiny import FAMILIES, tiny_model
from thinwire.codecs import ExactK, Identity, Subspace
from thinwire.engines.base import UpdateSettings
from thinwire.engines.optimizer import signed_merge
from thinwire.train.losses import RlConfig

CODECS = [Identity(), ExactK(keep=8), Subspace(subspace_dim=8)]
SETTINGS = UpdateSettings(learning_rate=1e-3, grad_clip=1.0)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ratio_is_exactly_one_at_the_first_inner_update(codec, family, dtype):
    """Same view, same micro-batches: new - old is 0.0 in every bit, with gradients on in one of the two."""
    eng = helpers.engine(tiny_model(family, layers=4).to(dtype))
    tick, seen = helpers.batches(), helpers.view(codec, 2)
    loss = helpers.losses(eng, tick, seen)
    differences = []

    def watch(index, batch, reading):
        differences.append((reading.logprob_BR.detach() - loss.old_logprob_BR[index]).abs().max().item())
        return loss(index, batch, reading)

    eng.train_step(tick, seen, watch)
    assert differences == [0.0, 0.0]
    assert all(reading["actor/pg_clipfrac"] == reading["actor/ppo_kl"] == 0.0 for reading in loss.readings)


def test_a_basis_published_between_old_and_train_pass_is_seen_as_clipped_tokens():
    """Falsely clipped tokens: with another basis in the train pass the ratio is not 1."""
    eng = helpers.engine()
    tick, seen = helpers.batches(), helpers.view(Subspace(subspace_dim=8), 2)
    loss = helpers.losses(eng, tick, seen)
    moments = eng.boundary_moments(tick, seen).moments
    states = [seen.codec.learn(s, m, 1) for s, m in zip(seen.states, moments, strict=True)]
    other = type(seen)(seen.codec, tuple(states), seen.seed, seen.step)
    assert other.fingerprint() != seen.fingerprint()
    eng.train_step(tick, other, loss)
    assert sum(reading["actor/pg_clipfrac"] for reading in loss.readings) > 0.1


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_micro_batches_add_up_to_the_gradient_of_one_batch(codec, micro):
    """8 rows in 8, 4 and 2 micro-batches against one, in float64: only the order of float64 sums differs
    (1e-12), since each payload value is rounded to bf16 from the same number."""
    model = tiny_model("llama", layers=4).double()
    whole, parts = [], []
    for size, kept in ((8, whole), (micro, parts)):
        eng = helpers.engine(model)
        tick, seen = helpers.batches(8, size), helpers.view(codec, 2)
        eng.train_step(tick, seen, helpers.losses(eng, tick, seen))
        kept.extend(helpers.gradients(eng))
        model.zero_grad()
    scale = max(g.abs().max() for g in whole)
    worst = max((a - b).abs().max() for a, b in zip(whole, parts, strict=True))
    assert worst <= 1e-12 * scale


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"],
)
def test_every_aggregation_mode_gives_the_same_loss_in_micro_batches(mode):
    """Float32 sums of 8 rows in another order: 1e-5 relative."""
    rl = RlConfig(aggregation=mode, kl_coefficient=0.1)
    totals = []
    for size in (8, 3, 1):
        eng = helpers.engine()
        tick, seen = helpers.batches(8, size), helpers.view(Identity(), 2)
        totals.append(sum(eng.train_step(tick, seen, helpers.losses(eng, tick, seen, rl))))
    assert totals[1:] == pytest.approx([totals[0]] * 2, rel=1e-5, abs=1e-6)


def test_forward_and_moments_leave_no_trace():
    """Parameters, gradients, optimizer state and torch's random state are bitwise what they were."""
    eng = helpers.engine()
    tick, seen = helpers.batches(), helpers.view(Subspace(subspace_dim=8), 2)
    eng.train_step(tick, seen, helpers.losses(eng, tick, seen))
    eng.apply_update(SETTINGS)
    eng.train_step(tick, seen, helpers.losses(eng, tick, seen))
    before = {name: t.clone() for name, t in eng.state().items()}
    grads, random = helpers.gradients(eng), torch.get_rng_state()
    eng.forward(tick, seen, "reference")
    eng.boundary_moments(tick, seen, loss_function=helpers.losses(eng, tick, seen))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], t) for name, t in eng.state().items())
    assert all(torch.equal(a, b) for a, b in zip(grads, helpers.gradients(eng), strict=True))


def test_moments_are_those_of_the_hidden_states_over_real_tokens():
    """Against a plain hook-free recomputation row by row; float32 sums of about 50 tokens: 1e-4."""
    eng = helpers.engine()
    tick, seen = helpers.batches(6, 2), helpers.view(ExactK(keep=4), 2)
    moments = eng.boundary_moments(tick, seen).moments
    source = helpers.rows(6)
    total = [torch.zeros(32, 32) for _ in range(2)]
    for prompt, response in zip(source.prompt_ids, source.response_ids, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        hidden = eng.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        for boundary, after in enumerate((1, 2)):
            state = hidden[after + 1][0].detach()
            total[boundary] += state.T @ state
    for got, expected in zip(moments, total, strict=True):
        torch.testing.assert_close(got.second_DD, expected, rtol=1e-4, atol=1e-4)
    num_tokens = sum(len(p) + len(r) for p, r in zip(source.prompt_ids, source.response_ids, strict=True))
    assert [m.num_tokens for m in moments] == [num_tokens] * 2


def test_gradient_moments_are_those_of_the_losss_gradients_at_the_boundaries():
    """Against autograd on the whole model row by row, loss = -sum of response log-probabilities; float32 sums
    of about 50 tokens: 1e-4 relative."""
    eng = helpers.engine()
    tick, seen = helpers.batches(6, 2), helpers.view(ExactK(keep=4), 2)
    reading = eng.boundary_moments(tick, seen, loss_function=lambda _, batch, read: -read.logprob_BR.sum())
    source = helpers.rows(6)
    total = [torch.zeros(32, 32) for _ in range(2)]
    for prompt, response in zip(source.prompt_ids, source.response_ids, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        out = eng.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        logprob = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        loss = -logprob.gather(1, torch.tensor(response)[:, None]).sum()
        at = [out.hidden_states[after + 1] for after in (1, 2)]
        for boundary, gradient in enumerate(torch.autograd.grad(loss, at)):
            total[boundary] += gradient[0].T @ gradient[0]
    assert reading.gradient_moments is not None
    for got, expected in zip(reading.gradient_moments, total, strict=True):
        torch.testing.assert_close(got.second_DD, expected, rtol=1e-4, atol=1e-4 * float(expected.max()))
    plain = eng.boundary_moments(tick, seen)
    assert plain.gradient_moments is None
    for got, expected in zip(reading.moments, plain.moments, strict=True):
        torch.testing.assert_close(got.second_DD, expected.second_DD, rtol=1e-5, atol=1e-5)


def test_an_update_that_is_not_finite_changes_nothing():
    eng = helpers.engine()
    before = {name: t.clone() for name, t in eng.state().items()}
    eng.model.lm_head.weight.grad = torch.full_like(eng.model.lm_head.weight, math.inf)
    outcome = eng.apply_update(SETTINGS)
    assert not outcome.applied
    assert all(torch.equal(before[name], t) for name, t in eng.state().items())
    assert all(p.grad is None for p in eng.model.parameters())


def test_an_update_equals_torch_adamw_with_clipping():
    """One tick against clip_grad_norm_ and torch.optim.AdamW on a twin; both float32, the norm summed in
    another order: 1e-6."""
    model, twin = tiny_model("llama", layers=4), tiny_model("llama", layers=4)
    eng = helpers.engine(model, weight_decay=0.1)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(3):
        tick, seen = helpers.batches(seed=step), helpers.view(Identity(), 2)
        eng.train_step(tick, seen, helpers.losses(eng, tick, seen))
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = own.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        assert eng.apply_update(SETTINGS).grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


def test_bf16_weights_follow_fp32_masters():
    """A rate below the bf16 grid moves the masters; the compute weights are always their rounding."""
    eng = helpers.engine(tiny_model("llama", layers=4).bfloat16(), learning_rate=1e-6)
    tick, seen = helpers.batches(), helpers.view(ExactK(keep=8), 2)
    start = {name: t.clone() for name, t in eng.state().items() if name.startswith("weight.")}
    for _ in range(2):
        eng.train_step(tick, seen, helpers.losses(eng, tick, seen))
        eng.apply_update(UpdateSettings(1e-6, 1.0))
    state = eng.state()
    moved = sum(int((state[name] != t).sum()) for name, t in start.items())
    assert moved > 0
    for name, parameter in eng.model.named_parameters():
        assert torch.equal(parameter, state[f"weight.{name}"].bfloat16())


def test_the_signed_merge_is_the_equation_per_coordinate():
    gradient, average = torch.tensor([3.0, -2.0, 0.5]), torch.tensor([-1.0, -4.0, 0.0])
    assert torch.equal(signed_merge(gradient, average, 0.5), torch.tensor([0.0, -2.0, 0.25]))
    assert torch.equal(signed_merge(gradient, average, 1.0), gradient)


def test_state_round_trips_bit_for_bit():
    eng = helpers.engine(has_snapshot=True)
    tick, seen = helpers.batches(), helpers.view(ExactK(keep=8), 2)
    reading = eng.boundary_moments(tick, seen, loss_function=helpers.losses(eng, tick, seen))
    eng.merge_anchor(reading.gradient, 0.9)
    eng.take_snapshot(1)
    eng.train_step(tick, seen, helpers.losses(eng, tick, seen))
    eng.apply_update(UpdateSettings(1e-3, 1.0, merge_alpha=0.5))
    other = helpers.engine(has_snapshot=True)
    other.load_state(eng.state())
    kept = other.state()
    assert kept.keys() == eng.state().keys()
    assert all(torch.equal(t, kept[name]) for name, t in eng.state().items())
    for twin in (eng, other):
        twin.train_step(tick, seen, helpers.losses(twin, tick, seen))
        twin.apply_update(UpdateSettings(1e-3, 1.0, merge_alpha=0.5))
    assert all(torch.equal(t, other.state()[name]) for name, t in eng.state().items())


def test_a_snapshot_keeps_the_weights_of_its_step():
    eng = helpers.engine(has_snapshot=True)
    tick, seen = helpers.batches(), helpers.view(Identity(), 2)
    old = eng.forward(tick, seen)
    eng.take_snapshot(1)
    eng.train_step(tick, seen, helpers.losses(eng, tick, seen))
    eng.apply_update(SETTINGS)
    eng.use_snapshot(1)
    stale = eng.forward(tick, seen, "snapshot")
    now = eng.forward(tick, seen)
    assert torch.equal(stale[0].logprob_BR, old[0].logprob_BR)
    assert not torch.equal(now[0].logprob_BR, old[0].logprob_BR)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_gradient_checkpointing_changes_no_bit(codec):
    results = []
    for checkpointed in (False, True):
        model = tiny_model("llama", layers=4)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        eng = helpers.engine(model)
        tick, seen = helpers.batches(), helpers.view(codec, 2)
        eng.train_step(tick, seen, helpers.losses(eng, tick, seen))
        results.append(helpers.gradients(eng))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_errors_are_what_the_view_changed_at_real_tokens_and_leave_the_readings_alone(codec, monkeypatch):
    """Against the difference taken at the view itself, token by token; 1e-6: the order of fp32 sums."""
    eng, tick, seen = helpers.engine(), helpers.batches(), helpers.view(codec, 2)
    plain = eng.forward(tick, seen)
    crossed = {0: [], 1: []}
    real = type(seen).cross

    def watch(self, hidden_BTD, boundary, sample_B):
        sent_BTD = real(self, hidden_BTD, boundary, sample_B)
        crossed[boundary].append((sent_BTD - hidden_BTD).detach())
        return sent_BTD

    monkeypatch.setattr(type(seen), "cross", watch)
    read = eng.forward(tick, seen, with_errors=True)
    errors_ND = eng.take_errors()
    for boundary, seen_errors in crossed.items():
        real_ND = torch.cat([e[b.token_mask_BT] for e, b in zip(seen_errors, tick, strict=True)])
        torch.testing.assert_close(errors_ND[boundary], real_ND.mean(0), atol=1e-6, rtol=1e-5)
    assert all(torch.equal(a.logprob_BR, b.logprob_BR) for a, b in zip(plain, read, strict=True))
    assert (errors_ND.abs().max() > 0) == (codec.name != "identity")
