"""Errors, biases and Gaussian references at the boundaries, and gradients of parameters."""

import math

import pytest
import torch

from tests.bench.helpers import CPU, WIDTH, bound, rows, subject, views
from thinwire.bench.errors import DIRECTIONS, ERROR_KEYS, boundary_errors, refuse_non_finite, spectra
from thinwire.bench.gradients import GradientReading, compare
from thinwire.bench.passes import add_moments, dense_passes, statistics
from thinwire.bench.rollouts import micro_batches
from thinwire.codecs import Moments
from thinwire.core.errors import UserError


@pytest.fixture(scope="module")
def passes():
    return dense_passes(subject(), micro_batches(rows(), CPU))[0]


def test_identity_makes_no_error_anywhere(passes):
    for both in boundary_errors(views(bound("identity")), passes):
        assert both == {direction: dict.fromkeys(ERROR_KEYS, 0.0) for direction in DIRECTIONS}


def test_the_subspace_error_is_what_lies_outside_and_all_of_it_is_bias(passes):
    """Rounding the sent values to bf16 adds up to (2^-9)^2 of |h|^2: 1% of what is found is ample."""
    (view,) = views(bound("subspace", subspace_dim=4))
    for b, both in enumerate(boundary_errors([view], passes)):
        basis_DR = view.states[b].tensors["basis_DR"]
        for direction, values in (("forward", passes[0].hidden), ("backward", passes[0].gradient)):
            x_ND = values[b][passes[0].batch.token_mask_BT]
            outside_ND = x_ND - x_ND @ basis_DR @ basis_DR.T
            expected = float(outside_ND.square().sum() / x_ND.square().sum())
            assert both[direction]["relative_error"] == pytest.approx(expected, rel=1e-2)
            assert both[direction]["squared_bias"] == both[direction]["relative_error"]
            assert both[direction]["bias_standard_error"] == 0.0


def test_the_bias_of_a_random_mask_vanishes_and_its_error_is_the_formula(passes):
    """exact-k: E|e|^2 = (D/K - 1)|h|^2 for every token. Bias within 5 of its own standard errors (false
    alarm below 1e-5 for each of four readings); error within 15% over 36 draws of 100 tokens."""
    for both in boundary_errors(views(bound("exact-k", keep=4), num=36), passes):
        for reading in both.values():
            assert abs(reading["squared_bias"]) < 5 * reading["bias_standard_error"]
            assert reading["bias_standard_error"] < 0.5
            assert reading["relative_error"] == pytest.approx(WIDTH / 4 - 1, rel=0.15)


def test_more_draws_narrow_the_bias(passes):
    few, many = (
        boundary_errors(views(bound("exact-k", keep=4), num=num), passes)[0]["forward"] for num in (3, 30)
    )
    assert many["bias_standard_error"] < few["bias_standard_error"] / 3


def test_nothing_but_zeros_has_no_relative_error(passes):
    none = [type(passes[0])(p.batch, p.responses, p.hidden, tuple(g * 0 for g in p.gradient)) for p in passes]
    reading = boundary_errors(views(bound("subspace")), none)[0]["backward"]
    assert reading == dict.fromkeys(ERROR_KEYS)


def test_the_reference_is_below_what_the_best_subspace_leaves(passes):
    """Giving 16 bits to each of the R largest directions is one of the splits that water-filling beats."""
    for both in spectra(passes):
        for spectrum in both.values():
            values = spectrum.eigenvalues_D.clamp(min=0).sort(descending=True).values
            left = float(values[4:].sum() + 4.0**-16 * values[:4].sum()) / spectrum.mean_square
            assert 0 < spectrum.reference(64) <= left
            assert spectrum.reference(0) == pytest.approx(float(values.sum()) / spectrum.mean_square)


def test_a_covariance_that_is_not_finite_names_its_boundary():
    moments = Moments(3, torch.zeros(2), torch.tensor([[1.0, math.nan], [0.0, 1.0]]))
    with pytest.raises(UserError, match="boundary/4/backward: the covariance"):
        refuse_non_finite(moments, 4, "backward")


def test_statistics_are_the_sums_over_real_tokens(passes):
    """Another order of fp32 additions: 1e-5."""
    forward, backward = statistics(subject(), micro_batches(rows(), CPU))
    mask_BT = passes[0].batch.token_mask_BT
    for moments, values in ((forward, passes[0].hidden), (backward, passes[0].gradient)):
        x_ND = values[1][mask_BT]
        assert moments[1].num_tokens == len(x_ND)
        torch.testing.assert_close(moments[1].second_DD, x_ND.T @ x_ND, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moments[1].sum_D, x_ND.sum(0), rtol=1e-5, atol=1e-5)


def test_moments_add_up():
    x_ND = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    added = add_moments(add_moments(None, x_ND[:7]), x_ND[7:])
    assert added.num_tokens == 20
    torch.testing.assert_close(added.second_DD, x_ND.T @ x_ND)


def test_gradients_compare_as_one_long_vector():
    a = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    b = [torch.tensor([0.0, 0.0]), torch.tensor([[5.0]])]
    assert compare(a, b) == pytest.approx((0.8, (9 + 1) / 25, 1.0))
    assert compare(b, b) == (1.0, 0.0, 1.0)
    assert compare([torch.zeros(2), torch.zeros(1, 1)], b) == (None, 1.0, 0.0)
    with pytest.raises(ValueError, match="is 0"):
        compare(b, [torch.zeros(2), torch.zeros(1, 1)])


def test_opposite_draws_have_a_mean_gradient_nearer_than_each():
    dense = [torch.tensor([1.0, 0.0])]
    reading = GradientReading(dense)
    for side in (2.0, -2.0):
        reading.add_([torch.tensor([1.0, side])])
    found = reading.finish()
    assert found["cosine"] == pytest.approx(1 / math.sqrt(5))
    assert found["relative_error"] == pytest.approx(4.0)
    assert found["norm_ratio"] == pytest.approx(math.sqrt(5))
    assert (found["cosine_of_mean"], found["relative_error_of_mean"]) == (1.0, 0.0)
