"""The in-process sampler: what it logs is what it drew from, and nothing but the keys decides the draw."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.tiny import FAMILIES, tiny_model
from thinwire.core.errors import NonFinite, UserError
from thinwire.models.load import quiet_transformers
from thinwire.sampling.base import Rollouts, SamplingConfig
from thinwire.sampling.distribution import inverse_cdf, log_distribution
from thinwire.sampling.hf import HFSampler, assert_dense

# float32 logits of size about 5 carry 5e-7 each; a dozen roundings on the way, times 1 / temperature (here at
# most 2.5), stay below the 1e-5 that is promised.
ATOL = 1e-5
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [20], [5, 6, 7, 8]]


@functools.cache
def shared_model(family: str):
    return tiny_model(family)


def make_sampler(family="llama", eos=(1,), **arguments) -> HFSampler:
    model = tiny_model(family, **arguments) if arguments else shared_model(family)
    return HFSampler(model, frozenset(eos), pad_id=0)


def draw(sampler, prompts=PROMPTS, group_size=4, seed=7, step=3, sample_ids=None, **settings_) -> Rollouts:
    config = SamplingConfig(**{"max_new_tokens": 8} | settings_)
    return sampler.sample(
        prompts, seed=seed, step=step, group_size=group_size, config=config, sample_ids=sample_ids
    )


def forced_logits(model, prompt, response) -> torch.Tensor:
    """Logits before every response token from one forward without cache or padding, float64 (R, V)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def reference_distribution(logits, temperature, top_k, top_p) -> tuple[dict[int, float], float]:
    """Token -> probability, written as a loop over ranks, and how near a rank's mass came to top_p."""
    weights = {i: math.exp((x - max(logits)) / temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))[: top_k or len(weights)]
    total = sum(weights[i] for i in ranked)
    kept, mass, margin = [], 0.0, 1.0
    for token in ranked:
        if mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / total
        margin = min(margin, abs(mass - top_p))
    kept_total = sum(weights[i] for i in kept)
    return {i: weights[i] / kept_total for i in kept}, margin if top_p < 1.0 else 1.0


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    temperature=st.floats(0.4, 2.0),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.3, 1e-6]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    min_new_tokens=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_logged_logprobs_are_those_of_the_renormalised_teacher_forced_distribution(
    family, temperature, top_p, top_k, lengths, min_new_tokens, seed
):
    sampler = make_sampler(family, eos=(1, 2, 3))
    prompts = [[4 + (seed + 7 * i + j) % 60 for j in range(n)] for i, n in enumerate(lengths)]
    rollouts = draw(
        sampler, prompts, 3, seed,
        temperature=temperature, top_p=top_p, top_k=top_k, min_new_tokens=min_new_tokens,
    )  # fmt: skip
    for prompt, response, logprobs in zip(
        rollouts.prompt_ids, rollouts.response_ids, rollouts.logprobs, strict=True
    ):
        logits = forced_logits(sampler.model, prompt, response)
        logits[:min_new_tokens, 1:4] = -torch.inf
        assert len(logprobs) == len(response)
        for row, token, logprob in zip(logits.tolist(), response, logprobs, strict=True):
            expected, margin = reference_distribution(row, temperature, top_k, top_p)
            if margin < ATOL:  # the last bit of a logit decides whether one more token is kept
                continue
            assert abs(math.log(expected[token]) - logprob) < ATOL


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_on_ragged_prompts(family):
    sampler = make_sampler(family)
    rollouts = draw(sampler, group_size=1, temperature=0.0, max_new_tokens=12)
    for prompt, response, logprobs in zip(PROMPTS, rollouts.response_ids, rollouts.logprobs, strict=True):
        expected = sampler.model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert response == expected[0, len(prompt) :].tolist()
        assert logprobs == [0.0] * len(response)


def test_tokens_follow_the_exact_joint_distribution_of_two_positions():
    """Chi-square of 16,384 two-token responses against exact probabilities, 64 cells; the bound fails a
    right sampler once in 10^6 seeds (this seed is fixed)."""
    sampler = make_sampler("llama", eos=(), vocab=8, hidden=16)
    rollouts = draw(sampler, [[5, 6]], group_size=16384, max_new_tokens=2, temperature=1.3)
    first = torch.softmax(forced_logits(sampler.model, [5, 6], [0]) / 1.3, -1)[0]
    second = torch.stack(
        [torch.softmax(forced_logits(sampler.model, [5, 6, i], [0]) / 1.3, -1)[0] for i in range(8)]
    )
    expected = (first[:, None] * second).flatten() * 16384
    observed = torch.bincount(torch.tensor([8 * a + b for a, b in rollouts.response_ids]), minlength=64)
    rare = expected < 5  # cells too small for the chi-square approximation are pooled
    observed = [*observed[~rare].tolist(), int(observed[rare].sum())]
    expected = [*expected[~rare].tolist(), float(expected[rare].sum())]
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    assert len(cells) > 20
    assert stats.chi2.sf(statistic, len(cells) - 1) > 1e-6


@pytest.mark.parametrize("batch_rows", [1, 3, 7, 16])
def test_draws_do_not_depend_on_the_batch(batch_rows):
    sampler = make_sampler()
    whole, parts = draw(sampler), draw(sampler, batch_rows=batch_rows)
    assert whole.response_ids == parts.response_ids
    assert whole.finished == parts.finished
    for a, b in zip(whole.logprobs, parts.logprobs, strict=True):
        assert a == pytest.approx(b, abs=ATOL)


def test_rows_keep_their_draws_in_another_order_when_sample_ids_are_kept():
    sampler = make_sampler()
    whole = draw(sampler)
    order = [2, 0, 3, 1]
    permuted = draw(
        sampler, [PROMPTS[p] for p in order], sample_ids=[4 * p + m for p in order for m in range(4)]
    )
    assert permuted.response_ids == [whole.response_ids[i] for i in permuted.sample]
    alone = draw(sampler, [PROMPTS[1]], group_size=1, sample_ids=[6])
    assert alone.response_ids == [whole.response_ids[6]]


def test_the_same_keys_repeat_and_another_seed_step_or_sample_differs():
    sampler = make_sampler(eos=())
    rollouts = draw(sampler)
    assert draw(sampler) == rollouts
    assert draw(sampler, seed=8).response_ids != rollouts.response_ids
    assert draw(sampler, step=4).response_ids != rollouts.response_ids
    assert len({tuple(r) for r in rollouts.response_ids[:4]}) == 4  # 8 tokens of about 4 bits: no repeat


def test_identical_prompts_and_group_members_are_prefilled_once_and_finished_rows_leave(monkeypatch):
    sampler = make_sampler(eos=range(1, 16))
    rows, forward = [], sampler.model.forward

    def counting_forward(*args, **kwargs):
        rows.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(sampler.model, "forward", counting_forward)
    rollouts = draw(sampler, [[5, 6], [8, 9, 10], [5, 6]], group_size=8)
    lengths = [len(response) for response in rollouts.response_ids]
    assert rows[0] == (2, 3)
    assert rows[1:] == [(sum(n > t for n in lengths), 1) for t in range(1, max(lengths))]
    assert len(set(lengths)) > 3


def test_every_end_of_sequence_id_ends_a_row_and_is_kept_as_its_last_token():
    eos = frozenset(range(1, 9))
    rollouts = draw(make_sampler(eos=eos), group_size=32, max_new_tokens=16)
    seen = set()
    for response, finished in zip(rollouts.response_ids, rollouts.finished, strict=True):
        assert not eos & set(response[:-1])
        assert finished == (response[-1] in eos)
        assert finished or len(response) == 16
        seen |= eos & {response[-1]}
    assert len(seen) > 3


def test_minimum_length_holds_every_end_of_sequence_id_back_and_maximum_cuts():
    sampler = make_sampler(eos=range(1, 33))
    free = draw(sampler, group_size=16)
    held = draw(sampler, group_size=16, min_new_tokens=3)
    assert min(map(len, free.response_ids)) == 1
    assert min(map(len, held.response_ids)) == 4
    cut = draw(sampler, max_new_tokens=5, min_new_tokens=5)
    assert {len(r) for r in cut.response_ids} == {5}
    assert not any(cut.finished)


def test_an_empty_completion_is_its_end_of_sequence_token_alone():
    rollouts = draw(make_sampler(eos=range(64)))
    assert {len(r) for r in rollouts.response_ids} == {1}
    assert all(rollouts.finished)
    assert all(logprob < 0 for (logprob,) in rollouts.logprobs)


def test_rows_are_groups_in_order_and_no_prompt_gives_no_row():
    rollouts = draw(make_sampler(), group_size=2)
    assert rollouts.prompt_ids == [p for p in PROMPTS for _ in range(2)]
    assert rollouts.sample == list(range(8))
    assert len(rollouts) == 8
    assert len(draw(make_sampler(), [])) == 0
    with pytest.raises(UserError, match="token 9999, but the model has"):
        draw(make_sampler(), [[9999]])
    with pytest.raises(ValueError, match="no empty prompt"):
        draw(make_sampler(), [[5], []])
    with pytest.raises(ValueError, match="got 1"):
        draw(make_sampler(), sample_ids=[0])


@pytest.mark.parametrize("where", ["", "model.layers.1", "lm_head"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_any_submodule_makes_the_sampler_refuse(where, kind):
    sampler = make_sampler(seed=1)
    handle = getattr(sampler.model.get_submodule(where), kind)(lambda *_: None)
    with pytest.raises(AssertionError, match="must see the dense model"):
        draw(sampler)
    handle.remove()
    assert len(draw(sampler)) == 16


def test_the_recorders_of_transformers_do_not_count_as_hooks():
    model = tiny_model("llama", seed=2)
    model(input_ids=torch.tensor([[5, 6]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert_dense(model)


def test_sampling_from_a_model_in_training_leaves_its_modes_and_ignores_dropout_and_checkpointing():
    expected = draw(make_sampler(seed=3))
    sampler = make_sampler(seed=3, attention_dropout=0.5)
    with quiet_transformers():
        sampler.model.gradient_checkpointing_enable()
    sampler.model.disable_input_require_grads()
    sampler.model.train()
    sampler.model.lm_head.eval()
    assert draw(sampler).response_ids == expected.response_ids
    assert sampler.model.training
    assert sampler.model.model.layers[0].training
    assert not sampler.model.lm_head.training
    assert all(parameter.requires_grad for parameter in sampler.model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_pushed_weights_are_sampled_from_and_the_version_is_recorded(family):
    sampler, other = make_sampler(family, seed=4), make_sampler(family, seed=5)
    before = draw(sampler)
    sampler.push(9, {name: p.detach().clone() for name, p in other.model.named_parameters()})
    after = draw(sampler)
    assert (before.version, after.version) == (0, 9)
    assert after.response_ids == draw(other).response_ids != before.response_ids
    sampler.push(10, other.model.state_dict())  # tied weights under both of their names
    assert draw(sampler).version == 10


def test_push_converts_the_number_format_and_does_not_copy_a_tensor_onto_itself():
    sampler = make_sampler(seed=6)
    own = dict(sampler.model.named_parameters())
    counters = {name: p._version for name, p in own.items()}
    sampler.push(1, own)
    sampler.push(2, {name: p.detach() for name, p in own.items()})
    assert {name: p._version for name, p in own.items()} == counters
    rounded = {name: p.detach().bfloat16() for name, p in own.items()}
    sampler.push(3, rounded)
    assert all(torch.equal(p, rounded[name].float()) for name, p in own.items())


def test_a_push_that_does_not_fit_changes_nothing():
    sampler = make_sampler("smollm", seed=7)
    good = {name: torch.zeros_like(p) for name, p in sampler.model.named_parameters()}
    before = {name: p.detach().clone() for name, p in sampler.model.named_parameters()}
    norm = "model.norm.weight"
    for bad, reason in (
        ({**good, "codec.basis": torch.zeros(1)}, r"unknown \['codec.basis'\]"),
        ({name: t for name, t in good.items() if name != norm}, rf"missing \['{norm}'\]"),
        ({**good, norm: torch.zeros(3)}, rf"another shape \['{norm}'\]"),
        ({**good, "lm_head.weight": torch.ones(64, 32)}, "tied here but not there"),
    ):
        with pytest.raises(ValueError, match=reason):
            sampler.push(1, bad)
    assert sampler.version == 0
    assert all(torch.equal(p, before[name]) for name, p in sampler.model.named_parameters())


def test_weights_that_are_not_finite_stop_the_run():
    sampler = make_sampler(seed=8)
    with torch.no_grad():
        sampler.model.model.norm.weight.fill_(torch.nan)
    for temperature in (1.0, 0.0):
        with pytest.raises(NonFinite, match="rollout_logprobs"):
            draw(sampler, temperature=temperature)


def test_bfloat16_weights_give_logprobs_of_their_own_logits():
    """Cached and uncached bfloat16 forwards round differently: 8 bits on logits of size 5 is 0.02 a rounding,
    and 0.3 covers a dozen of them; a wrong mask or position moves single tokens by nats."""
    sampler = HFSampler(tiny_model("qwen2", seed=9).bfloat16(), frozenset({1}), 0)
    rollouts = draw(sampler)
    for prompt, response, logprobs in zip(
        rollouts.prompt_ids, rollouts.response_ids, rollouts.logprobs, strict=True
    ):
        expected = torch.log_softmax(forced_logits(sampler.model, prompt, response), -1)
        expected = expected.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected, rtol=0, atol=0.3)


@given(
    excluded=st.lists(st.booleans(), min_size=2, max_size=40).filter(lambda x: not all(x)),
    word=st.sampled_from([0, 1, 2**31, 2**32 - 2, 2**32 - 1]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
@settings(max_examples=60, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(excluded, word, scale):
    logits = torch.arange(len(excluded), dtype=torch.float32).sin() * scale
    logits[torch.tensor(excluded)] = -torch.inf
    token, logprob = inverse_cdf(
        torch.log_softmax(logits[None], -1), torch.tensor([word * 2.0**-32], dtype=torch.float64)
    )
    assert not excluded[int(token)]
    assert math.isfinite(float(logprob))


def test_every_uniform_lands_in_the_interval_of_its_token():
    """Probabilities 1/2, 0, 1/4, 1/4 are exact in binary, so the edges must be exact too (closed below)."""
    logprob = torch.tensor([0.5, 0.0, 0.25, 0.25]).log().repeat(6, 1)
    uniform = torch.tensor([0.0, 0.5 - 2**-32, 0.5, 0.75 - 2**-32, 0.75, 1 - 2**-32], dtype=torch.float64)
    token, logged = inverse_cdf(logprob, uniform)
    assert token.tolist() == [0, 0, 2, 2, 3, 3]
    assert torch.equal(logged, logprob[0, token])


def test_ties_are_ranked_by_id_and_top_p_keeps_at_least_one_token():
    flat = torch.zeros(1, 5)
    for config, kept in (
        (SamplingConfig(top_k=2), [0, 1]),
        (SamplingConfig(top_p=0.5), [0, 1, 2]),
        (SamplingConfig(top_p=1e-9), [0]),
        (SamplingConfig(top_k=3, top_p=0.5), [0, 1]),  # top-p counts what top-k left: 1/3 < 1/2 <= 2/3
    ):
        distribution = log_distribution(flat, config)[0]
        assert distribution.isfinite().nonzero().flatten().tolist() == kept
        assert float(distribution.exp().sum()) == pytest.approx(1.0, abs=1e-6)


def test_wrong_settings_name_the_field_and_the_way_out():
    with pytest.raises(ValueError, match=r"min_new_tokens must be in 0\.\.4 .* got 5; lower it"):
        SamplingConfig(max_new_tokens=4, min_new_tokens=5)
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"group_size": 0}, {"temprature": 1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingConfig(**bad)
