"""Readings of tokens: against torch.distributions, scipy's bootstrap and the engine's own passes."""

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

from tests.bench.helpers import CPU, bound, rows, subject, views
from thinwire.bench.measure import NUM_RESAMPLES, TokenReadings, by_sequence, mean_with_interval, read_tokens
from thinwire.bench.passes import dense_passes, view_pass
from thinwire.bench.rollouts import micro_batches
from thinwire.codecs import CODECS
from thinwire.engines.local import LocalEngine, PassConfig
from thinwire.engines.optimizer import AdamWConfig
from thinwire.instruments.mismatch import mismatch_series

HEAD = torch.randn(11, 8, generator=torch.Generator().manual_seed(0))


def two_states(num=40):
    generator = torch.Generator().manual_seed(1)
    dense, view = torch.randn(2, num, 8, generator=generator)
    return dense, view, torch.randint(11, (num,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_readings_are_those_of_torch_distributions(temperature):
    """fp32 sums over 11 tokens: 1e-5."""
    dense, view, target = two_states()
    found = read_tokens(dense, view, target, lambda h: h @ HEAD.T, temperature, chunk_tokens=7)
    p, q = (torch.distributions.Categorical(logits=h @ HEAD.T / temperature) for h in (dense, view))
    expected = {
        "dense_logprob_N": p.log_prob(target),
        "view_logprob_N": q.log_prob(target),
        "kl_N": torch.distributions.kl_divergence(p, q),
        "dense_entropy_N": p.entropy(),
        "view_entropy_N": q.entropy(),
    }
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name), values.double(), rtol=1e-5, atol=1e-6)
    assert (found.kl_N > 0).all()
    assert torch.equal(found.gap_N, found.dense_logprob_N - found.view_logprob_N)


def test_chunks_change_nothing_and_equal_states_read_exactly_zero():
    dense, view, target = two_states()
    whole, parts = (
        read_tokens(dense, view, target, lambda h: h @ HEAD.T, 1.0, chunk_tokens=size) for size in (100, 40)
    )
    assert torch.equal(whole.kl_N, parts.kl_N)
    same = read_tokens(dense, dense.clone(), target, lambda h: h @ HEAD.T, 1.0)
    assert not same.gap_N.any()
    assert not same.kl_N.any()


def test_the_interval_is_scipys_percentile_bootstrap_over_sequences():
    generator = torch.Generator().manual_seed(2)
    sequence_N = torch.randint(0, 9, (120,), generator=generator) * 5
    value_N = torch.randn(120, generator=generator, dtype=torch.float64) + sequence_N / 20
    found = mean_with_interval(value_N, sequence_N, seed=3)
    sums, counts = by_sequence(value_N, sequence_N)
    expected = bootstrap(
        (sums, counts),
        lambda s, c, axis: s.sum(axis) / c.sum(axis),
        paired=True,
        n_resamples=NUM_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(3),
    ).confidence_interval
    assert found["mean"] == pytest.approx(float(value_N.mean()), rel=1e-12)
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high), rel=1e-12)


@pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.model_fields["name"].default)
def test_the_gap_is_that_of_the_engines_own_passes_through_the_same_view(kind):
    """rollout_corr/kl of the engine's log-probabilities; fp32 log-softmax over other chunks: 1e-5."""
    model = subject()
    (view,) = views(kind().at_width(32))
    batches = micro_batches(rows(), CPU)
    passes, _ = dense_passes(model, batches)
    readings, _ = view_pass(model, passes, view, with_gradient=False)
    engine = LocalEngine(model.model, 3, None, AdamWConfig(), PassConfig(), has_snapshot=False)
    (dense,), (old,) = engine.forward(batches, view.dense()), engine.forward(batches, view)
    series = mismatch_series(dense.logprob_BR, old.logprob_BR, batches[0].response_mask_BR)
    assert float(readings.gap_N.mean()) == pytest.approx(series["rollout_corr/kl"], abs=1e-5)
    mask_BR = batches[0].response_mask_BR
    assert float(readings.view_entropy_N.mean()) == pytest.approx(
        float(old.entropy_BR[mask_BR].mean()), abs=1e-5
    )


def test_means_over_draws_are_taken_token_by_token():
    parts = [TokenReadings(*(torch.tensor([a, b]).double() for _ in range(5))) for a, b in ((1, 2), (3, 6))]
    assert TokenReadings.mean(parts).kl_N.tolist() == [2.0, 4.0]


def test_an_exact_codec_reads_zero_with_and_without_gradient():
    model = subject()
    passes, gradient = dense_passes(model, micro_batches(rows(), CPU))
    (view,) = views(bound("identity"))
    for with_gradient in (True, False):
        readings, through = view_pass(model, passes, view, with_gradient=with_gradient)
        assert not readings.gap_N.any()
        assert not readings.kl_N.any()
        assert torch.equal(readings.view_entropy_N, readings.dense_entropy_N)
    _, through = view_pass(model, passes, view, with_gradient=True)
    assert all(torch.equal(a, b) for a, b in zip(through, gradient, strict=True))
