"""Reverse water-filling against a numerical optimiser, a bisection and the equations it has to satisfy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize

from thinwire.codecs.waterfill import reverse_water_filling

SPECTRUM = torch.tensor([9.0, 0.2, 4.0, 1.0, 0.05, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("bits", [0.3, 1.0, 2.5, 6.0, 20.0])
def test_no_split_of_the_bits_that_an_optimiser_finds_has_less_error(bits):
    """Minimise sum l_i 4^-b_i over b >= 0 with sum b = bits; SLSQP stops at 1e-12 of the objective."""
    spectrum = SPECTRUM.numpy()
    found = minimize(
        lambda b: float((spectrum * 4.0**-b).sum()),
        np.full(len(spectrum), bits / len(spectrum)),
        jac=lambda b: -math.log(4) * spectrum * 4.0**-b,
        bounds=[(0, None)] * len(spectrum),
        constraints={"type": "eq", "fun": lambda b: b.sum() - bits, "jac": lambda b: np.ones_like(b)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    exact = reverse_water_filling(SPECTRUM, bits)
    assert exact.distortion == pytest.approx(found.fun, rel=1e-6)
    assert exact.distortion <= found.fun * (1 + 1e-12)
    np.testing.assert_allclose(exact.bits_D.numpy(), found.x, atol=2e-3)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=30), st.floats(0.0, 300.0, allow_subnormal=False))
def test_level_bits_and_distortion_belong_together(values, bits):
    """Logarithms below 2^6 in float64 over at most 30 terms: 1e-12."""
    spectrum_D = torch.tensor(values, dtype=torch.float64)
    found = reverse_water_filling(spectrum_D, bits)
    assert float(found.bits_D.sum()) == pytest.approx(bits, rel=1e-11, abs=1e-11)
    left_D = spectrum_D * torch.exp2(-2 * found.bits_D)
    assert float(left_D.sum()) == pytest.approx(found.distortion, rel=1e-11)
    torch.testing.assert_close(left_D, spectrum_D.clamp(max=found.level), rtol=1e-11, atol=0)


@pytest.mark.parametrize("bits", [0.01, 1.0, 7.7])
def test_the_level_is_the_root_that_bisection_finds(bits):
    def rate(log_level):
        return float((0.5 * (SPECTRUM.log2() - log_level)).clamp(min=0).sum()) - bits

    root = brentq(rate, -60.0, math.log2(9.0), xtol=1e-13)
    assert math.log2(reverse_water_filling(SPECTRUM, bits).level) == pytest.approx(root, abs=1e-11)


def test_without_bits_all_is_lost_and_equal_directions_share_alike():
    whole = reverse_water_filling(SPECTRUM, 0.0)
    assert whole.distortion == pytest.approx(float(SPECTRUM.sum()), rel=1e-15)
    assert not whole.bits_D.any()
    equal = reverse_water_filling(torch.full((8,), 3.0), 8.0)
    assert equal.bits_D.tolist() == pytest.approx([1.0] * 8)
    assert equal.distortion == pytest.approx(8 * 3.0 / 4)


def test_null_directions_take_nothing_and_leave_nothing():
    with_null = reverse_water_filling(torch.cat([SPECTRUM, torch.tensor([0.0, -1e-17])]), 3.0)
    assert with_null.distortion == reverse_water_filling(SPECTRUM, 3.0).distortion
    assert with_null.bits_D[-2:].tolist() == [0.0, 0.0]
    assert reverse_water_filling(torch.zeros(3), 5.0) == (0.0, pytest.approx([0, 0, 0]), 0.0)


@pytest.mark.parametrize("bits", [-1.0, math.nan])
def test_a_rate_below_zero_is_refused(bits):
    with pytest.raises(ValueError, match="0 bits or more"):
        reverse_water_filling(SPECTRUM, bits)


def test_a_spectrum_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        reverse_water_filling(torch.tensor([1.0, math.inf]), 1.0)
