"""Truncated importance weights: detached, bounded, off by default."""

import math

import pytest
import torch

from thinwire.core.errors import UserError
from thinwire.rl.corrections import truncated_importance_weights

OLD_BR = torch.tensor([[-1.0, -2.0, math.nan], [0.0, 5000.0, -5000.0]], requires_grad=True)
ROLLOUT_BR = torch.tensor([[-1.5, -1.0, math.inf], [0.0, 0.0, 0.0]])
MASK_BR = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_off_by_default_leaves_every_token_its_weight_of_one():
    found_BR = truncated_importance_weights(OLD_BR, ROLLOUT_BR, MASK_BR)
    assert torch.equal(found_BR, MASK_BR.float())


def test_weights_are_the_ratio_truncated_detached_and_zero_on_padding():
    found_BR = truncated_importance_weights(OLD_BR, ROLLOUT_BR, MASK_BR, truncation=2.0)
    expected_BR = torch.tensor([[math.exp(0.5), math.exp(-1.0), 0.0], [1.0, 2.0, math.exp(-20.0)]])
    torch.testing.assert_close(found_BR, expected_BR, rtol=4 * 2.0**-23, atol=0)  # one float32 exp
    assert not found_BR.requires_grad


def test_a_truncation_of_zero_names_the_field():
    with pytest.raises(UserError, match=r"rl\.importance_truncation must be > 0, got 0"):
        truncated_importance_weights(OLD_BR, ROLLOUT_BR, MASK_BR, truncation=0.0)
