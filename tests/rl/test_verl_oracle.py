"""Every loss, estimate and series equals the number verl 0.9.1 computed on the same tensors.

The numbers and the script that made them are in oracle/. verl computes in float32. Where both sides do the
same float32 operations the bound is 4 roundings (FLOAT32); sums of up to 54 terms and float64 against
float32 get 64 (SUMS), against the sum of magnitudes where terms cancel.

Letters in shape suffixes: `B` rows, `R` response positions.
"""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from thinwire.instruments.mismatch import mismatch_series
from thinwire.rl.advantages import group_advantages
from thinwire.rl.aggregation import AggregationMode, aggregate, denominator
from thinwire.rl.corrections import truncated_importance_weights
from thinwire.rl.kl import kl_estimate
from thinwire.rl.policy_loss import policy_loss

ORACLE = json.loads((Path(__file__).parent / "oracle" / "verl_oracle.json").read_text())
EPSILON = 2.0**-23
FLOAT32 = 4 * EPSILON
SUMS = 64 * EPSILON
MODES = get_args(AggregationMode)


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_the_numbers_are_those_of_verl_0_9_1():
    assert ORACLE["versions"]["verl"] == "0.9.1"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ORACLE["policy"])
def test_policy_loss_and_its_gradient_equal_verl(name, mode):
    case = ORACLE["policy"][name]
    mask_BR, leaf_BR = tensor(case["mask"]), tensor(case["new"]).requires_grad_()
    result = policy_loss(leaf_BR, tensor(case["old"]), tensor(case["advantage_B"]), mask_BR, *case["clip"])
    loss = aggregate(result.loss_BR, mask_BR, mode, denominator(mask_BR))
    loss.backward()
    magnitude = aggregate(result.loss_BR.detach().abs(), mask_BR, mode, denominator(mask_BR)).item()
    assert loss.item() == pytest.approx(case["loss"][mode], abs=SUMS * magnitude)
    torch.testing.assert_close(leaf_BR.grad, tensor(case["gradient"][mode]), rtol=FLOAT32, atol=0)


@pytest.mark.parametrize("name", ORACLE["policy"])
def test_clip_fractions_and_ppo_kl_equal_verl(name):
    case = ORACLE["policy"][name]
    mask_BR = tensor(case["mask"])
    result = policy_loss(
        tensor(case["new"]), tensor(case["old"]), tensor(case["advantage_B"]), mask_BR, *case["clip"]
    )

    def mean(values_BR: Tensor) -> float:
        return aggregate(values_BR.float(), mask_BR, "token-mean", denominator(mask_BR)).item()

    metrics = case["metrics"]
    above, below = mean(result.clipped_above_BR), mean(result.clipped_below_BR)
    assert above + below == pytest.approx(metrics["actor/pg_clipfrac"], rel=FLOAT32)
    assert mean(result.clipped_dual_BR) == pytest.approx(metrics["actor/pg_clipfrac_lower"], rel=FLOAT32)
    magnitude = mean(result.negative_log_ratio_BR.abs())
    assert mean(result.negative_log_ratio_BR) == pytest.approx(metrics["actor/ppo_kl"], abs=SUMS * magnitude)


def test_the_oracle_has_every_branch_of_the_clip():
    """Guards the two tests above: no branch may be compared as 0 against 0 in all cases."""
    seen = torch.zeros(3, dtype=torch.int64)
    for case in ORACLE["policy"].values():
        result = policy_loss(
            tensor(case["new"]), tensor(case["old"]), tensor(case["advantage_B"]), tensor(case["mask"])
        )
        masks = (result.clipped_above_BR, result.clipped_below_BR, result.clipped_dual_BR)
        seen += torch.stack([mask_BR.sum() for mask_BR in masks])
    assert (seen >= 3).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ORACLE["kl"])
def test_kl_estimates_and_gradients_equal_verl(name, kind):
    """e^d - d - 1 in float32 has the absolute rounding of its terms: FLOAT32 times e^d is its scale here."""
    case = ORACLE["kl"][name]
    leaf_BR = tensor(case["new"]).requires_grad_()
    estimate = kl_estimate(leaf_BR, tensor(case["reference"]), tensor(case["mask"]), kind)
    estimate.value_BR.sum().backward()
    torch.testing.assert_close(
        estimate.value_BR.detach(), tensor(case["value"][kind]), rtol=FLOAT32, atol=FLOAT32
    )
    torch.testing.assert_close(leaf_BR.grad, tensor(case["gradient"][kind]), rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize("name", [name for name in ORACLE["advantages"] if name != "all equal"])
@pytest.mark.parametrize("standardise", [True, False])
def test_advantages_equal_verl(name, standardise):
    """verl takes mean and deviation in float32: a few roundings of a score, over the deviation."""
    case = ORACLE["advantages"][name]
    score_B = tensor(case["score"])
    found_B = group_advantages(score_B, case["group_size"], standardise=standardise)
    expected_B = tensor(case["standardised" if standardise else "centred"])
    scale = 1.0
    if standardise and case["group_size"] > 1:
        deviation_P = score_B.reshape(-1, case["group_size"]).std(dim=1)
        scale = 1.0 / deviation_P[deviation_P > 0].min().item()
    torch.testing.assert_close(found_B, expected_B, rtol=0, atol=8 * EPSILON * scale * score_B.abs().max())


def test_all_equal_groups_are_exactly_zero_where_verl_keeps_a_rounding():
    case = ORACLE["advantages"]["all equal"]
    assert min(case["standardised"]) > 0.1  # 1.2e-7 of rounding over (1.2e-7 of deviation + 1e-6)
    assert group_advantages(tensor(case["score"]), case["group_size"]).tolist() == [0.0] * case["group_size"]


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_equals_verl_whole_scaled_and_in_shares(mode):
    case = ORACLE["aggregation"]
    value_BR, mask_BR = tensor(case["value"]), tensor(case["mask"])
    whole = denominator(mask_BR)
    bound = SUMS * aggregate(value_BR.abs(), mask_BR, mode, whole).item()
    assert aggregate(value_BR, mask_BR, mode, whole).item() == pytest.approx(case["whole"][mode], abs=bound)
    scaled = aggregate(value_BR, mask_BR, mode, denominator(mask_BR, case["loss_scale_factor"])).item()
    assert scaled == pytest.approx(case["scaled"][mode], abs=2 * bound)  # 7 instead of 9 below the line
    shares = [aggregate(value_BR[rows], mask_BR[rows], mode, whole) for rows in (slice(0, 3), slice(3, 6))]
    for share, expected in zip(shares, case["shares"][mode], strict=True):
        assert share.item() == pytest.approx(expected, abs=bound)


@pytest.mark.parametrize("name", ORACLE["mismatch"])
def test_rollout_corr_series_equal_verl(name):
    """float64 here, float32 there: e^x carries the rounding of x, up to 20 nats x 2^-24 x 2, per token."""
    case = ORACLE["mismatch"][name]
    found = mismatch_series(tensor(case["rollout"]), tensor(case["old"]), tensor(case["mask"]))
    assert found.keys() == case["series"].keys()
    for key, expected in case["series"].items():
        assert found[key] == pytest.approx(expected, rel=SUMS, abs=SUMS), key


@pytest.mark.parametrize("threshold", ["1.5", "2.0"])
@pytest.mark.parametrize("name", ORACLE["mismatch"])
def test_truncated_importance_weights_equal_verl(name, threshold):
    case = ORACLE["mismatch"][name]
    found_BR = truncated_importance_weights(
        tensor(case["old"]), tensor(case["rollout"]), tensor(case["mask"]), float(threshold)
    )
    torch.testing.assert_close(found_BR, tensor(case["weights"][threshold]), rtol=FLOAT32, atol=0)
