"""The rollout_corr series: on cases done by hand, under padding, and always finite."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.instruments.mismatch import mismatch_series

GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 200.0, -1e30])


def test_series_of_a_case_done_by_hand():
    """Row 1 gaps 1 and 3 (mean 2), row 2 gap -1: per token mean 1, per row mean 0.5. Float64: 1e-14."""
    rollout_BR = torch.tensor([[-1.0, -1.0], [-2.0, 9.0]])
    old_BR = torch.tensor([[-2.0, -4.0], [-1.0, 9.0]])
    found = mismatch_series(rollout_BR, old_BR, torch.tensor([[1, 1], [1, 0]]))
    e = math.exp
    expected = {
        "kl": 1.0,
        "k3_kl": (e(-1) + 1 - 1 + e(-3) + 3 - 1 + e(1) - 1 - 1) / 3,
        "log_ppl_diff": 0.5,
        "log_ppl_abs_diff": 1.5,
        "log_ppl_diff_max": 2.0,
        "log_ppl_diff_min": -1.0,
        "ppl_ratio": (e(2) + e(-1)) / 2,
        "training_ppl": (e(3) + e(1)) / 2,
        "rollout_ppl": (e(1) + e(2)) / 2,
        "training_log_ppl": 2.0,
        "rollout_log_ppl": 1.5,
        "chi2_token": (e(-2) + e(-6) + e(2)) / 3 - 1,
        "chi2_seq": (e(-8) + e(2)) / 2 - 1,
    }
    assert found == pytest.approx(
        {f"rollout_corr/{key}": value for key, value in expected.items()}, rel=1e-14
    )


@settings(max_examples=30, deadline=None)
@given(rollout=GARBAGE, old=GARBAGE)
def test_padding_never_changes_a_series(rollout, old):
    mask_BR = torch.tensor([[1, 1, 0], [1, 0, 0]])
    clean = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]])
    kept_BR = mask_BR.bool()
    found = mismatch_series(
        torch.where(kept_BR, clean, rollout), torch.where(kept_BR, clean - 1, old), mask_BR
    )
    assert found == mismatch_series(clean, clean - 1, mask_BR)
    assert found["rollout_corr/kl"] == 1.0


def test_equal_policies_read_zero_everywhere_a_divergence_is_read():
    logprob_BR = -torch.rand(4, 5, generator=torch.Generator().manual_seed(1))
    found = mismatch_series(logprob_BR, logprob_BR, torch.ones(4, 5))
    zero = ("kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "chi2_token", "chi2_seq")
    assert [found[f"rollout_corr/{name}"] for name in zero] == [0.0] * len(zero)
    assert found["rollout_corr/ppl_ratio"] == 1.0


def test_absurd_logprobs_still_make_strict_json():
    rollout_BR, old_BR = torch.tensor([[-3000.0, 0.0]]), torch.tensor([[0.0, -4000.0]])
    json.dumps(mismatch_series(rollout_BR, old_BR, torch.ones(1, 2)), allow_nan=False)


def test_nothing_is_reported_without_a_token():
    assert mismatch_series(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3)) == {}
    assert mismatch_series(torch.ones(0, 3), torch.ones(0, 3), torch.zeros(0, 3)) == {}
