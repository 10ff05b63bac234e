"""Identities and error formulas of blockwise rounding, tiles and their scales.

A mean over N independent keys is held to theory within 6 of its standard errors: 2e-9 a comparison.
Letters: N tokens, D hidden size, K channels kept.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard as hadamard_matrix

from thinwire.codecs import CodecState, RoundToNearest, StochasticRounding, TileRotated, cross
from thinwire.codecs.draws import dither, uniforms_of, unmarked
from thinwire.codecs.packing import saturated
from thinwire.codecs.quantise import coded_scale, dequantise_blocks, hadamard, quantise_blocks, scale_of
from thinwire.core.errors import UserError
from thinwire.core.keys import Stream, TokenKeys

EMPTY = CodecState(0, {})


def keys(num, step=1):
    return TokenKeys(7, step, torch.arange(num), torch.arange(num) % 11)


def crossed(codec, hidden_D, num):
    """h~ for the same h under `num` keys."""
    hidden_ND = hidden_D.expand(num, -1).contiguous()
    return cross(hidden_ND, codec, codec.draw(keys(num), 0), EMPTY).double()


def assert_mean(values, expected, slack=1e-5):
    bound = 6 * values.std() / len(values) ** 0.5 + slack * expected
    assert abs(values.mean() - expected) <= bound


def rounding_variance(values, block, bits, scale_bits):
    """sum step^2 f (1 - f) in float64, by the formula and apart from the code that quantises."""
    total, levels = 0.0, (1 << bits) - 1
    for start in range(0, len(values), block):
        part = np.asarray(values[start : start + block], dtype=np.float64)
        scale = scale_above(np.abs(part).max(), scale_bits)
        step = 2 * scale / levels
        place = (part + scale) / step
        fraction = place - np.floor(place)
        total += float((step**2 * fraction * (1 - fraction)).sum())
    return total


def scale_above(value, scale_bits):
    """The smallest m 2^e at or above a value, m in [1, 2) with scale_bits - 8 fractional bits."""
    mantissa, exponent = math.frexp(value)
    grain = 2.0 ** (exponent - 1 - (scale_bits - 8))
    return math.ceil(mantissa * 2.0**exponent / grain) * grain


@given(value=st.floats(2.0**-120, 2.0**126, width=32), bits=st.integers(8, 15))
def test_a_coded_scale_is_the_smallest_of_its_bits_at_or_above_the_value(value, bits):
    code = coded_scale(torch.tensor([value]), bits)
    assert 0 < int(code) < 1 << bits
    assert float(scale_of(code, bits)) == scale_above(value, bits)
    assert value <= float(scale_of(code, bits)) <= value * (1 + 2.0 ** (8 - bits))


@pytest.mark.parametrize("bits", range(8, 16))
def test_scales_of_zero_subnormal_and_infinite_values_stay_in_range(bits):
    value = torch.tensor([0.0, 1e-45, 2.0**-126, torch.finfo(torch.float32).max, torch.inf])
    scales = scale_of(coded_scale(value, bits), bits).tolist()
    assert scales[0] == 0.0
    assert scales[1] == scales[2] == 2.0**-126
    assert scales[3] == scales[4] == 2.0**127 * (2 - 2.0 ** (8 - bits))


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 40),
    block=st.integers(1, 50),
    bits=st.integers(1, 8),
    offset=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 50),
)
def test_rounding_moves_no_value_further_than_a_step(num, block, bits, offset, seed):
    """Half a step at offset 1/2. 1e-5 covers fp32 places of up to 255."""
    values = torch.randn(3, num, generator=torch.Generator().manual_seed(seed))
    sent = quantise_blocks(values, block, bits, 12, offset)
    for codes, width in zip(sent, (12, bits), strict=True):
        assert int(codes.min()) >= 0
        assert int(codes.max()) < 1 << width
    decoded = dequantise_blocks(sent, block, bits, 12)
    scale = scale_of(sent[0], 12).repeat_interleave(block, -1)[:, :num]
    step = 2 * scale / ((1 << bits) - 1)
    reach = 0.5 if offset == 0.5 else 1.0
    assert ((decoded - values).abs() <= (reach + 1e-4) * step).all()


def test_a_value_beyond_the_largest_scale_is_clamped_and_stays_finite():
    """(D / K) h overflows fp32 here; what comes back is the largest scale."""
    for kind in (StochasticRounding, RoundToNearest):
        codec = kind(keep=2, bits=4).at_width(16)
        hidden_ND = torch.full((5, 16), 3e38)
        decoded_ND = cross(hidden_ND, codec, codec.draw(keys(5), 0), EMPTY)
        assert torch.isfinite(decoded_ND).all()
        assert (decoded_ND.max(-1).values > 3e38).all()


def test_saturated_is_a_cast_that_knows_no_infinity():
    values = torch.tensor([1.0, 70000.0, -1e30, torch.finfo(torch.float32).max])
    assert saturated(values, torch.float16).tolist() == [1.0, 65504.0, -65504.0, 65504.0]
    assert torch.isfinite(saturated(values, torch.bfloat16)).all()
    assert saturated(values, torch.float64).tolist() == values.tolist()
    assert saturated(values, torch.float32) is values


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_stochastic_rounding_of_all_channels_has_its_variance_and_mean(bits):
    """K = D = 40 in blocks of 16 (the last one of 8): only rounding is left. The dither has 2^16 places, so
    the mean of a channel is off by 2^-17 step at most."""
    codec = StochasticRounding(bits=bits, block=16, keep=40).at_width(40)
    hidden_D = torch.randn(40, generator=torch.Generator().manual_seed(2))
    decoded_ND = crossed(codec, hidden_D, 4000)
    assert_mean((decoded_ND - hidden_D).square().sum(-1), rounding_variance(hidden_D.tolist(), 16, bits, 12))
    for channel in range(40):
        got = decoded_ND[:, channel]
        largest_step = 2 * 4.0 / ((1 << bits) - 1)
        assert abs(got.mean() - hidden_D[channel]) <= 6 * got.std() / 4000**0.5 + 2.0**-16 * largest_step


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_of_a_subset_adds_the_error_of_the_mask(bits):
    codec = StochasticRounding(bits=bits, block=8, keep=20).at_width(40)
    hidden_D = torch.randn(40, generator=torch.Generator().manual_seed(2))
    num = 3000
    kept_NK = codec.draw(keys(num), 0)[:, :20].long()
    scaled_NK = (hidden_D[kept_NK] * 2).tolist()
    expected = np.mean([rounding_variance(values, 8, bits, 12) for values in scaled_NK])
    error = (crossed(codec, hidden_D, num) - hidden_D).square().sum(-1)
    assert_mean(error, (40 / 20 - 1) * float(hidden_D.square().sum()) + expected)


def test_noise_is_another_one_backward_than_forward_and_in_another_step():
    codec = StochasticRounding(bits=1, keep=64).at_width(64)
    hidden_ND = torch.randn(30, 64)
    draw = codec.draw(keys(30), 0)
    _, forward = codec.encode(hidden_ND, draw, EMPTY)
    _, backward = codec.encode_gradient(hidden_ND, draw, EMPTY)
    _, again = codec.encode(hidden_ND, draw, EMPTY)
    _, later = codec.encode(hidden_ND, codec.draw(keys(30, step=2), 0), EMPTY)
    assert torch.equal(forward, again)
    for other in (backward, later):
        agreement = (forward == other).double().mean()
        assert 0.5 < agreement < 0.9


def test_dither_is_uniform_symmetric_and_of_16_bits():
    noise = uniforms_of(dither(keys(2000), Stream.ACTIVATION_NOISE, 0, 7))
    assert noise.shape == (2000, 7)
    assert 0.0 < float(noise.min()) < 1e-3
    assert 1 - 1e-3 < float(noise.max()) < 1.0
    assert abs(float(noise.mean()) - 0.5) < 6 * 12**-0.5 / 14000**0.5
    extremes = uniforms_of(torch.tensor([-(1 << 15), (1 << 15) - 1], dtype=torch.int16))
    assert extremes.sum() == 1.0


@pytest.mark.parametrize("bits", [1, 2, 5])
def test_round_to_nearest_is_the_deterministic_limit_of_stochastic_rounding(bits):
    """The same payload with the dither held at 1/2, and the level that stochastic rounding takes most."""
    nearest = RoundToNearest(bits=bits, keep=40).at_width(40)
    stochastic = StochasticRounding(bits=bits, keep=40).at_width(40)
    hidden_D = torch.randn(40, generator=torch.Generator().manual_seed(2))
    num = 4000
    decoded_ND, sampled_ND = crossed(nearest, hidden_D, num), crossed(stochastic, hidden_D, num)
    assert (decoded_ND == decoded_ND[0]).all()
    most_often = sampled_ND.mode(0).values
    step = 2 * float(hidden_D.abs().max()) / ((1 << bits) - 1)
    clear = ((hidden_D - decoded_ND[0]).abs() < 0.4 * step) & (
        (sampled_ND == most_often).double().mean(0) > 0.55
    )
    assert clear.any()
    assert torch.equal(most_often[clear], decoded_ND[0][clear])
    draw = stochastic.draw(keys(5), 0)
    draw[:, 40:] = 0  # the dither closest to 1/2
    hidden_ND = hidden_D.expand(5, -1).contiguous()
    assert torch.equal(cross(hidden_ND, stochastic, draw, EMPTY).double(), decoded_ND[:5])


def test_round_to_nearest_repeats_its_error_where_stochastic_rounding_averages_it_out():
    """The mean over T keys keeps the whole squared error of one, and 1 / T of that of the other."""
    hidden_D = torch.randn(64, generator=torch.Generator().manual_seed(2))
    for kind, share in ((RoundToNearest, 1.0), (StochasticRounding, 1 / 500)):
        decoded_ND = crossed(kind(bits=2, keep=64).at_width(64), hidden_D, 500)
        each = (decoded_ND - hidden_D).square().sum(-1).mean()
        mean = (decoded_ND.mean(0) - hidden_D).square().sum()
        assert float(mean / each) == pytest.approx(share, rel=0.5)


def test_one_bit_to_nearest_is_the_sign_times_the_scale_of_its_block():
    codec = RoundToNearest(bits=1, block=4, keep=8, scale_bits=15).at_width(8)
    hidden_ND = torch.tensor([[0.5, -0.25, 0.125, -0.5, 4.0, -1.0, 1.0, -8.0]])
    decoded_ND = cross(hidden_ND, codec, codec.draw(keys(1), 0), EMPTY)
    assert decoded_ND.tolist() == [[0.5, -0.5, 0.5, -0.5, 8.0, -8.0, 8.0, -8.0]]


def test_values_on_the_grid_come_back_exactly_from_both_roundings():
    """Scale 3 with 2 bits: levels -3, -1, 1, 3, which no noise in (0, 1) can move."""
    hidden_ND = torch.tensor([[3.0, -1.0, 1.0, -3.0]]).repeat(50, 1)
    for kind in (StochasticRounding, RoundToNearest):
        codec = kind(bits=2, keep=4).at_width(4)
        assert torch.equal(cross(hidden_ND, codec, codec.draw(keys(50), 0), EMPTY), hidden_ND)


@pytest.mark.parametrize("log_width", range(8))
def test_the_hadamard_transform_is_scipys_matrix_orthonormal_and_its_own_inverse(log_width):
    """1e-6 of ||v||: one fp32 rounding in each of at most seven stages."""
    width = 1 << log_width
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
    matrix = torch.tensor(hadamard_matrix(width)).double() / width**0.5
    turned = hadamard(values)
    torch.testing.assert_close(turned.double(), values.double() @ matrix.T, rtol=0, atol=1e-6 * width**0.5)
    torch.testing.assert_close(turned.norm(dim=-1), values.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(hadamard(turned), values, rtol=0, atol=1e-6 * width**0.5)
    assert torch.equal(hadamard(torch.eye(width)) * width**0.5 > 0, matrix > 0)


@pytest.mark.parametrize("keep", [16, 32])
def test_tile_rotated_has_the_error_of_its_mask_and_of_its_turned_values(keep):
    """The values that are rounded are found anew from the draw with scipy's matrix."""
    codec = TileRotated(bits=3, tile=8, tiles=keep // 8).at_width(32)
    hidden_D = torch.randn(32, generator=torch.Generator().manual_seed(2))
    num = 3000
    channel_NK, flip_NK = unmarked(codec.draw(keys(num), 0)[:, :keep])
    signed_NK = hidden_D[channel_NK] * torch.where(flip_NK, -1.0, 1.0) * (32 / keep)
    matrix = torch.tensor(hadamard_matrix(8)).double() / 8**0.5
    turned_NK = (signed_NK.double().reshape(num, -1, 8) @ matrix).reshape(num, keep)
    expected = np.mean([rounding_variance(values, 8, 3, 12) for values in turned_NK.tolist()])
    error = (crossed(codec, hidden_D, num) - hidden_D).square().sum(-1)
    assert_mean(error, (32 / keep - 1) * float(hidden_D.square().sum()) + expected, slack=1e-4)


def test_tile_rotated_to_nearest_is_biased_for_one_token_and_says_so():
    codec = TileRotated(bits=2, tile=8, tiles=4, rounding="nearest").at_width(32)
    assert codec.unbiased == frozenset()
    assert TileRotated().at_width(32).unbiased == {"forward", "backward"}
    hidden_D = torch.zeros(32).scatter(0, torch.arange(0, 32, 8), 5.0) + 0.3
    decoded_ND = crossed(codec, hidden_D, 4000)
    deviation_D = (decoded_ND.mean(0) - hidden_D).abs()
    assert (deviation_D > 6 * decoded_ND.std(0) / 4000**0.5).any()


def test_a_tile_spreads_one_massive_channel_over_its_neighbours():
    """8 bits, one channel 1e3 times the others: the turned tile is nearly flat, so its scale is smaller by
    sqrt(32), and the whole error falls by about that squared against rounding the channels themselves."""
    hidden_D = torch.randn(32, generator=torch.Generator().manual_seed(2))
    hidden_D[5] = 1000.0
    plain = crossed(StochasticRounding(bits=4, keep=32).at_width(32), hidden_D, 500)
    tiled = crossed(TileRotated(bits=4, tile=32, tiles=1).at_width(32), hidden_D, 500)
    errors = [(got - hidden_D).square().sum(-1).mean() for got in (plain, tiled)]
    assert errors[0] > 10 * errors[1]


def test_the_signs_of_a_tile_are_fair_keyed_coins():
    codec = TileRotated().at_width(576)
    keep = codec.tile * codec.tiles
    _, flip_NK = unmarked(codec.draw(keys(200), 0)[:, :keep])
    assert abs(float(flip_NK.double().mean()) - 0.5) < 6 * 0.5 / (200 * keep) ** 0.5


@pytest.mark.parametrize(
    ("codec", "width", "bits"),
    [
        (StochasticRounding(), 1536, 514 * 2 + 17 * 12),
        (StochasticRounding(bits=1), 1536, 896 + 28 * 12),
        (StochasticRounding(), 576, 192 * 2 + 6 * 12),
        (StochasticRounding(scale_bits=8), 128, 40 * 2 + 2 * 8),
        (TileRotated(), 1536, 11 * (32 * 3 + 12)),
        (TileRotated(bits=4), 1536, 8 * (32 * 4 + 12)),
        (TileRotated(), 576, 4 * (32 * 3 + 12)),
        (TileRotated(), 128, 16 * 3 + 12),
    ],
)
def test_wire_bits_are_codes_and_scales_in_whole_bytes(codec, width, bits):
    assert codec.at_width(width).wire_bits(torch.float32) == 8 * -(-bits // 8)


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (StochasticRounding(bits=9), r"codec.bits must be in 1\.\.8, got 9"),
        (StochasticRounding(block=0), "codec.block"),
        (RoundToNearest(scale_bits=16), r"codec.scale_bits must be in 8\.\.15"),
        (StochasticRounding(keep=129), r"codec.keep must be in 1\.\.128 \(the hidden size\)"),
        (StochasticRounding(keep=3, bits_per_value=1.0), "give one"),
        (StochasticRounding(bits_per_value=0.05), "sends 16 at least"),
        (TileRotated(bits=0), "codec.bits"),
        (TileRotated(scale_bits=7), "codec.scale_bits"),
        (TileRotated(tile=12), r"codec.tile must be a power of two in 1\.\.128, got 12"),
        (TileRotated(tile=256), "codec.tile"),
        (TileRotated(tile=64), "sends 208 at least"),
        (TileRotated(tile=8, tiles=17), r"codec.tiles must be in 1\.\.16"),
        (TileRotated(tiles=2, bits_per_value=2.0), "give one"),
    ],
)
def test_a_setting_that_does_not_fit_the_width_is_refused_by_name(codec, words):
    with pytest.raises(UserError, match=words):
        codec.at_width(128)
