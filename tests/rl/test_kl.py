"""KL estimates: safe under padding, unbiased where they say so, clamped only where they say so."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.errors import UserError
from thinwire.rl.kl import kl_estimate

GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 200.0, -200.0, 1e30])
KINDS = ["k1", "k2", "k3"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(new=GARBAGE, reference=GARBAGE)
def test_padding_never_changes_estimate_or_gradient(kind, new, reference):
    new_BR = torch.tensor([[-1.0, new, new], [-0.5, -2.0, new]], requires_grad=True)
    reference_BR = torch.tensor([[-1.2, reference, reference], [-0.1, -1.5, reference]])
    mask_BR = torch.tensor([[1, 0, 0], [1, 1, 0]])
    estimate = kl_estimate(new_BR, reference_BR, mask_BR, kind)
    estimate.value_BR.sum().backward()
    padded_BR = mask_BR == 0
    for value_BR in (estimate.value_BR, estimate.unclamped_BR, estimate.clamped_BR, new_BR.grad):
        assert (value_BR[padded_BR] == 0).all()
    assert torch.isfinite(new_BR.grad).all()
    assert (new_BR.grad[~padded_BR] != 0).all()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_for_current_against_reference(kind):
    """The expectation over all 7 tokens is exact, no sampling; both sides are float64 sums of 7 terms.

    The other direction differs by more than 0.1 on this pair, so a swapped argument fails.
    """
    generator = torch.Generator().manual_seed(2)
    current_V, reference_V = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    mask_BR = torch.ones(1, 7)
    value_V = kl_estimate(current_V[None], reference_V[None], mask_BR, kind).value_BR[0]
    exact = (current_V.exp() * (current_V - reference_V)).sum()
    reverse = (reference_V.exp() * (reference_V - current_V)).sum()
    torch.testing.assert_close((current_V.exp() * value_V).sum(), exact, rtol=0, atol=1e-14)
    assert (exact - reverse).abs() > 0.1


def test_the_expected_gradient_of_k2_is_that_of_the_kl():
    """Gradient with respect to logits, expectation over all tokens exact in float64."""
    generator = torch.Generator().manual_seed(3)
    logits_V, other_V = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    reference_V = other_V.log_softmax(-1)
    leaf_V = logits_V.clone().requires_grad_()
    current_V = leaf_V.log_softmax(-1)
    value_V = kl_estimate(current_V[None], reference_V[None], torch.ones(1, 6), "k2").value_BR[0]
    (current_V.exp().detach() * value_V).sum().backward()
    exact_V = logits_V.clone().requires_grad_()
    log_V = exact_V.log_softmax(-1)
    (log_V.exp() * (log_V - reference_V)).sum().backward()
    torch.testing.assert_close(leaf_V.grad, exact_V.grad, rtol=0, atol=1e-14)


def test_k3_says_where_its_clamp_acts_and_keeps_the_unclamped_value():
    difference = torch.tensor([[0.0, 1.0, 2.6, 2.62, -10.9, -11.1, 25.0, 300.0, -300.0]])
    leaf_BR = (-difference).requires_grad_()
    estimate = kl_estimate(leaf_BR, torch.zeros_like(difference), torch.ones_like(difference), "k3")
    estimate.value_BR.sum().backward()
    expected = [False, False, False, True, False, True, True, True, True]
    assert estimate.clamped_BR[0].tolist() == expected
    assert (estimate.value_BR.detach()[estimate.clamped_BR] == 10).all()
    assert (leaf_BR.grad[estimate.clamped_BR] == 0).all()
    exact = torch.expm1(difference.double()) - difference.double()
    assert torch.equal(estimate.unclamped_BR, exact)
    free_BR = ~estimate.clamped_BR
    # float32 e^d - d - 1 below 14: two roundings of 2^-24 x 16
    torch.testing.assert_close(estimate.value_BR[free_BR].double(), exact[free_BR], rtol=0, atol=2e-6)


def test_an_overflowing_difference_stays_finite():
    reference_BR, new_BR = torch.tensor([[0.0]]), torch.tensor([[-5000.0]])
    assert torch.isfinite(kl_estimate(new_BR, reference_BR, torch.ones(1, 1), "k3").unclamped_BR).all()


def test_an_unknown_kind_names_the_field():
    with pytest.raises(UserError, match=r"rl\.kl_estimator must be one of k1, k2, k3; got 'k4'"):
        kl_estimate(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), "k4")
