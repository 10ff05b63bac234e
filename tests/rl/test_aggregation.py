"""Aggregation: micro-batches add up, padding is never seen, empty input is a zero and not a nan."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.errors import UserError
from thinwire.rl.aggregation import AggregationMode, aggregate, denominator, masked_difference

MODES = get_args(AggregationMode)


def batch(lengths, positions, seed):
    """Float64 values of rows with the given numbers of tokens."""
    mask_BR = torch.arange(positions) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(mask_BR.shape, generator=generator, dtype=torch.float64), mask_BR


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    cut=st.integers(1, 5),
    garbage=st.sampled_from([float("nan"), float("inf"), -200.0, 1e30]),
    seed=st.integers(0, 2**31),
)
def test_shares_of_micro_batches_add_up_whatever_padding_holds(mode, lengths, cut, garbage, seed):
    """1e-12: at most 54 float64 terms of magnitude below 6, so 54 x 6 x 2^-53 = 4e-14 on either side."""
    values_BR, mask_BR = batch(lengths, 6, seed)
    dirty_BR = torch.where(mask_BR, values_BR, garbage).requires_grad_()
    whole = denominator(mask_BR)
    loss = aggregate(values_BR, mask_BR, mode, whole)
    shares = [
        aggregate(dirty_BR[rows : rows + cut], mask_BR[rows : rows + cut], mode, whole)
        for rows in range(0, len(lengths), cut)
    ]
    total = torch.stack(shares).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), loss, rtol=0, atol=1e-12)
    assert (dirty_BR.grad[~mask_BR] == 0).all()
    assert torch.isfinite(dirty_BR.grad).all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 3),
        ("seq-mean-token-mean", (2 + 10) / 2),
    ],
)
def test_each_mode_is_its_formula_on_a_case_done_by_hand(mode, expected):
    """Rows (1, 2, 3), (10) and an empty one: the empty row counts nowhere."""
    values_BR = torch.tensor([[1.0, 2.0, 3.0], [10.0, 7.0, 7.0], [7.0, 7.0, 7.0]], dtype=torch.float64)
    mask_BR = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert aggregate(values_BR, mask_BR, mode, denominator(mask_BR)).item() == pytest.approx(
        expected, rel=1e-15
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [0, 3])
def test_a_mini_batch_without_tokens_is_a_zero_with_zero_gradient(mode, rows):
    values_BR = torch.ones(rows, 4, requires_grad=True)
    mask_BR = torch.zeros(rows, 4)
    loss = aggregate(values_BR, mask_BR, mode, denominator(mask_BR))
    loss.backward()
    assert loss.item() == 0.0
    assert (values_BR.grad == 0).all()


def test_bool_and_float_masks_count_alike():
    _, mask_BR = batch([2, 0, 3], 3, 0)
    assert denominator(mask_BR) == denominator(mask_BR.float())
    assert denominator(mask_BR, 5).norm_tokens == 5
    assert (denominator(mask_BR).tokens, denominator(mask_BR).sequences) == (5, 2)


def test_a_wrong_mode_or_scale_names_the_field_and_the_way_out():
    mask_BR = torch.ones(1, 1)
    with pytest.raises(UserError, match=r"rl\.aggregation must be one of token-mean.*got 'mean'"):
        aggregate(mask_BR, mask_BR, "mean", denominator(mask_BR))
    with pytest.raises(UserError, match=r"rl\.loss_scale_factor must be >= 1 .*got 0"):
        denominator(mask_BR, 0)


def test_difference_of_half_precision_is_taken_in_float32():
    """In bfloat16 3.0 - 2.984375 would be exact too, but 10.0625 - 0.015625 needs 10 bits of fraction."""
    minuend, subtrahend = torch.tensor([[10.0625]]).bfloat16(), torch.tensor([[0.015625]]).bfloat16()
    found = masked_difference(minuend, subtrahend, torch.ones(1, 1))
    assert found.dtype == torch.float32
    assert found.item() == minuend.item() - subtrahend.item()
