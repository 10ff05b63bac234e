"""Group advantages: equal groups are silent, the rest is standardised."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinwire.core.errors import UserError
from thinwire.rl.advantages import group_advantages, num_equal_groups

SCORES = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=100, deadline=None)
@given(score=st.floats(-1e6, 1e6), group_size=st.integers(2, 17), standardise=st.booleans())
@example(score=0.7, group_size=7, standardise=True)  # the float64 mean of these misses them by a rounding
def test_an_equal_group_gives_exactly_zero(score, group_size, standardise):
    score_B = torch.full((group_size,), score, dtype=torch.float64)
    assert (group_advantages(score_B, group_size, standardise=standardise) == 0).all()
    assert num_equal_groups(score_B, group_size) == 1


@settings(max_examples=100, deadline=None)
@given(scores=st.lists(SCORES, min_size=12, max_size=12), group_size=st.sampled_from([2, 3, 4, 6]))
def test_a_group_sums_to_zero_and_its_neighbours_change_nothing(scores, group_size):
    """Each of at most 6 advantages below 3 is rounded once to float32: 6 x 3 x 2^-24 = 1.1e-6."""
    score_B = torch.tensor(scores)
    advantage_B = group_advantages(score_B, group_size)
    sums_P = advantage_B.double().reshape(-1, group_size).sum(dim=1)
    torch.testing.assert_close(sums_P, torch.zeros_like(sums_P), rtol=0, atol=1.1e-6)
    first_B = group_advantages(score_B[:group_size], group_size)
    assert torch.equal(first_B, advantage_B[:group_size])


def test_a_group_of_one_keeps_its_score_and_is_no_equal_group():
    score_B = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
    assert torch.equal(group_advantages(score_B, 1), score_B / (1 + 1e-6))
    assert torch.equal(group_advantages(score_B, 1, standardise=False), score_B)
    assert num_equal_groups(score_B, 1) == 0


def test_one_right_answer_of_two_gives_plus_and_minus_root_half():
    """Deviations +-1/2 over a sample deviation of sqrt(1/2); epsilon 0 leaves float64 rounding alone."""
    found = group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), 2, epsilon=0.0)
    assert found.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-15)


def test_only_equal_groups_are_counted():
    score_B = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert num_equal_groups(score_B, 2) == 2
    assert group_advantages(torch.tensor([True, False]), 2).dtype == torch.float32


def test_no_rows_give_no_advantages():
    assert group_advantages(torch.empty(0), 4).shape == (0,)
    assert num_equal_groups(torch.empty(0), 4) == 0


def test_a_group_size_below_one_names_the_field():
    with pytest.raises(UserError, match=r"sampling\.group_size must be >= 1, got 0"):
        group_advantages(torch.ones(4), 0)
