"""Levels, bits and transforms of transform coding against published tables, brute force and numpy."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import transform_coding as coding
from thinwire.core.keys import TokenKeys

MAX_1960 = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
"""Mean squared errors of the optimum quantiser for a unit normal value, Max 1960, table I, four digits."""


@pytest.mark.parametrize("bits", MAX_1960)
def test_errors_are_those_of_maxs_table(bits):
    """His iteration stopped early at 4 and 5 bits, where the last digits are off by up to 0.3%."""
    assert coding.lloyd_max(bits)[1] == pytest.approx(MAX_1960[bits], rel=3e-3)


@pytest.mark.parametrize("bits", range(1, coding.MAX_BITS + 1))
def test_levels_are_symmetric_and_the_error_is_that_of_a_sample(bits):
    """200,000 values: the sample's mean error is off by less than 5 of its standard errors."""
    levels, error = coding.lloyd_max(bits)
    np.testing.assert_array_equal(levels, -levels[::-1])
    values = np.random.default_rng(bits).standard_normal(200_000)
    squares = (values - levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, values)]) ** 2
    assert abs(squares.mean() - error) < 5 * squares.std() / len(squares) ** 0.5


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4), st.integers(0, 7))
def test_no_other_split_of_the_bits_has_a_smaller_error(variances, num_bits):
    variances = sorted(variances, reverse=True)
    error = coding.distortions()
    bits = coding.allocate_bits(variances, num_bits)
    assert sum(bits) == num_bits
    assert bits == sorted(bits, reverse=True)
    total = sum(v * error[b] for v, b in zip(variances, bits, strict=True))
    for other in itertools.product(range(num_bits + 1), repeat=len(variances)):
        if sum(other) == num_bits:
            least = sum(v * error[b] for v, b in zip(variances, other, strict=True))
            assert total <= least * (1 + 1e-12)


def test_bits_beyond_what_directions_take_are_left_over():
    assert coding.allocate_bits([2.0, 1.0], 99) == [coding.MAX_BITS] * 2
    assert coding.allocate_bits([1.0, 0.0], 0) == [0, 0]


def test_signs_are_fair_keyed_and_cut_where_asked():
    keys = TokenKeys(3, 1, torch.arange(2000), torch.zeros(2000, dtype=torch.int64))
    word_NW = coding.keyed_signs(keys, 0, 70)
    signs_NC = coding.signs_of(word_NW, 0, 70)
    assert set(signs_NC.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(coding.signs_of(word_NW, 40, 30), signs_NC[:, 40:])
    assert signs_NC.mean(0).abs().max() < 5 / 2000**0.5
    correlation = torch.corrcoef(signs_NC.T) - torch.eye(70)
    assert correlation.abs().max() < 5 / 2000**0.5
    assert not torch.equal(word_NW, coding.keyed_signs(keys, 1, 70))


def covariance(num, seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(num, num, generator=generator, dtype=torch.float64)
    return root @ root.T


def test_without_a_weight_the_directions_are_the_leading_eigenvectors():
    second = covariance(9, 0)
    encode_DM, decode_MD, variance_M = coding.white_directions(second, None, 4)
    np.testing.assert_allclose(variance_M, np.linalg.eigvalsh(second)[::-1][:4], rtol=1e-10)
    torch.testing.assert_close(encode_DM.T @ second @ encode_DM, torch.diag(variance_M), rtol=0, atol=1e-9)
    torch.testing.assert_close(decode_MD, encode_DM.T)


def test_with_a_weight_directions_are_uncorrelated_and_errors_in_them_are_the_weighted_error():
    """x^T W x = |y|^2 for x = y F, and y = x E has covariance diag(l); float64, sums of 9."""
    second, weight = covariance(9, 1), covariance(9, 2)
    encode_DM, decode_MD, variance_M = coding.white_directions(second, weight, 9)
    torch.testing.assert_close(encode_DM.T @ second @ encode_DM, torch.diag(variance_M), rtol=0, atol=1e-7)
    torch.testing.assert_close(decode_MD @ weight @ decode_MD.T, torch.eye(9).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(decode_MD @ encode_DM, torch.eye(9).double(), rtol=0, atol=1e-9)
    assert (variance_M.diff() <= 0).all()


def test_a_weight_that_is_singular_leaves_everything_finite():
    weight = torch.outer(torch.arange(5.0).double(), torch.arange(5.0).double())
    for found in coding.white_directions(covariance(5, 3), weight, 5):
        assert torch.isfinite(found).all()
