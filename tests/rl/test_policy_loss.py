"""The policy loss: safe under any padding, its branches exact and apart."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.errors import UserError
from thinwire.rl.policy_loss import policy_loss

GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 200.0, -200.0, 1e30])


@settings(max_examples=100, deadline=None)
@given(new=GARBAGE, old=GARBAGE, advantage=GARBAGE, seed=st.integers(0, 2**31))
def test_padding_never_changes_loss_or_gradient(new, old, advantage, seed):
    generator = torch.Generator().manual_seed(seed)
    mask_BR = torch.arange(5) < torch.tensor([5, 2, 0, 1])[:, None]
    clean = [torch.randn(mask_BR.shape, generator=generator) for _ in range(3)]
    dirty = [torch.where(mask_BR, c, g) for c, g in zip(clean, (new, old, advantage), strict=True)]
    results = []
    for new_BR, old_BR, advantage_BR in (clean, dirty):
        leaf_BR = new_BR.clone().requires_grad_()
        result = policy_loss(leaf_BR, old_BR, advantage_BR, mask_BR)
        result.loss_BR.sum().backward()
        results.append((result, leaf_BR.grad))
    (first, first_gradient_BR), (second, second_gradient_BR) = results
    assert torch.equal(first_gradient_BR, second_gradient_BR)
    assert (second_gradient_BR[~mask_BR] == 0).all()
    for name, value_BR in vars(first).items():
        assert torch.equal(value_BR, getattr(second, name)), name
        assert (getattr(second, name)[~mask_BR] == 0).all(), name


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "branch"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.1, 2.0, -2.2, -2.2, None),
        (1.5, 2.0, -2.4, 0.0, "above"),
        (0.5, 2.0, -1.0, -1.0, None),
        (1.5, -2.0, 3.0, 3.0, None),
        (0.5, -2.0, 1.6, 0.0, "below"),
        (4.0, -2.0, 6.0, 0.0, "dual"),
        (4.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_each_branch_is_its_formula(ratio, advantage, loss, slope, branch):
    """Float64 case by case; exp(log(ratio)) is off by a few 2^-53, so 1e-14."""
    leaf = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    result = policy_loss(
        leaf, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([advantage]), torch.ones(1, 1)
    )
    result.loss_BR.sum().backward()
    assert result.loss_BR.item() == pytest.approx(loss, abs=1e-14)
    assert leaf.grad.item() == pytest.approx(slope, abs=1e-14)
    found = [name for name in ("above", "below", "dual") if getattr(result, f"clipped_{name}_BR").item()]
    assert found == ([branch] if branch else [])
    assert result.negative_log_ratio_BR.item() == pytest.approx(-math.log(ratio), abs=1e-14)


def test_equal_policies_give_ratio_exactly_one_and_the_plain_gradient():
    logprob_BR = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    advantage_B = torch.tensor([1.5, -0.3, 0.0])
    result = policy_loss(logprob_BR, logprob_BR.detach().clone(), advantage_B, torch.ones(3, 4))
    result.loss_BR.sum().backward()
    expected_BR = -advantage_B[:, None].expand(3, 4)
    assert torch.equal(result.loss_BR.detach(), expected_BR)
    assert torch.equal(logprob_BR.grad, expected_BR)


def test_an_infinite_dual_clip_is_no_dual_clip():
    leaf_BR = torch.full((3, 1), 5.0, requires_grad=True)
    advantage_B = torch.tensor([1.0, 0.0, -1.0])
    result = policy_loss(leaf_BR, torch.zeros(3, 1), advantage_B, torch.ones(3, 1), dual_clip=math.inf)
    result.loss_BR.sum().backward()
    assert not result.clipped_dual_BR.any()
    expected = torch.exp(torch.tensor(5.0)).item()
    assert result.loss_BR.flatten().tolist() == [pytest.approx(-1.2), 0.0, expected]
    assert leaf_BR.grad.flatten().tolist() == [0.0, 0.0, expected]


def test_no_gradient_reaches_the_old_policy():
    old_BR = torch.zeros(1, 2, requires_grad=True)
    new_BR = torch.ones(1, 2, requires_grad=True)
    policy_loss(new_BR, old_BR, torch.ones(1), torch.ones(1, 2)).loss_BR.sum().backward()
    assert old_BR.grad is None


@pytest.mark.parametrize("field", ["clip_low", "clip_high", "dual_clip"])
def test_a_clip_out_of_range_names_its_field(field):
    value = {"clip_low": 1.0, "clip_high": -0.1, "dual_clip": math.nan}[field]
    one = torch.ones(1, 1)
    with pytest.raises(UserError, match=rf"rl\.{field} must be .* got {value}"):
        policy_loss(one, one, one, one, **{field: value})
