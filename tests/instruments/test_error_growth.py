"""Accumulated codec error: exact exponents where the answer is known, laws over many draws elsewhere."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.instruments.error_growth import MIN_WINDOW, WINDOW, ErrorGrowth, growth_exponent


def after(errors_TND):
    growth = ErrorGrowth.at_start(errors_TND.shape[1], errors_TND.shape[2])
    for error_ND in errors_TND:
        growth = growth.after(error_ND)
    return growth


@given(st.integers(MIN_WINDOW, WINDOW), st.floats(1e-6, 1e3))
def test_one_and_the_same_error_grows_like_t(num_steps, scale):
    """m(l) = l^2 |e|^2 exactly; 1e-9: rounding of float64 logarithms."""
    error_WD = scale * torch.linspace(-1, 1, 16).expand(num_steps, 16)
    assert growth_exponent(error_WD) == pytest.approx(1.0, abs=1e-6)


def test_independent_errors_grow_like_the_root_of_t():
    """E m(l) = l E|e|^2, so the mean exponent over 400 draws is 1/2: standard error about 0.003 here."""
    generator = torch.Generator().manual_seed(1)
    draws = [growth_exponent(torch.randn(WINDOW, 64, generator=generator)) for _ in range(400)]
    assert np.mean(draws) == pytest.approx(0.5, abs=0.01)
    assert np.std(draws) < 0.1


def test_an_error_held_for_l_steps_lies_between():
    """Held for 8 of 32 steps: like T within, like sqrt(T) beyond."""
    generator = torch.Generator().manual_seed(1)
    held = [torch.randn(4, 64, generator=generator).repeat_interleave(8, 0) for _ in range(100)]
    assert 0.7 < np.mean([growth_exponent(error_WD) for error_WD in held]) < 0.9


def test_alternating_errors_cancel():
    signs_W = torch.tensor([1.0, -1.0]).repeat(WINDOW // 2)
    assert growth_exponent(signs_W[:, None] * torch.ones(WINDOW, 8)) is None  # two steps cancel exactly
    noisy = signs_W[:, None] * torch.ones(WINDOW, 8) + 0.1 * torch.randn(WINDOW, 8)
    assert growth_exponent(noisy) < 0.3


def test_the_sum_runs_over_the_whole_run_and_the_window_over_its_end():
    errors_TND = torch.randn(3 * WINDOW, 2, 8, generator=torch.Generator().manual_seed(2))
    growth = after(errors_TND)
    torch.testing.assert_close(growth.total_ND, errors_TND.sum(0))
    assert torch.equal(growth.recent_WND, errors_TND[-WINDOW:])
    series = growth.series()
    assert series["error_growth/norm_1"] == pytest.approx(float(errors_TND[:, 1].sum(0).norm()), rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(errors_TND[-1], errors_TND[-2], dim=-1).mean()
    assert series["error_growth/cosine"] == pytest.approx(float(cosine), rel=1e-5)
    exponents = [growth_exponent(errors_TND[-WINDOW:, b]) for b in range(2)]
    assert series["error_growth/exponent"] == pytest.approx(np.mean(exponents))


def test_no_error_has_neither_direction_nor_exponent():
    series = after(torch.zeros(WINDOW, 2, 8)).series()
    assert series == {f"error_growth/{name}": 0.0 for name in ("norm_0", "norm_1", "step_norm")}


def test_few_steps_have_no_exponent():
    assert growth_exponent(torch.ones(MIN_WINDOW - 1, 4)) is None
    assert ErrorGrowth.at_start(2, 4).series() == {}
