"""Identities and error formulas of bernoulli, antithetic, rms-matched and low-rank-residual.

A mean over N independent keys is held to theory within 6 of its standard errors: 2e-9 a comparison.
Letters: N tokens, D hidden size, K channels kept.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from thinwire.codecs import (
    Antithetic,
    Bernoulli,
    CodecState,
    ExactK,
    LowRankResidual,
    Moments,
    RmsMatched,
    cross,
)
from thinwire.codecs import low_rank_residual as low_rank_module
from thinwire.codecs import rms_matched as rms_module
from thinwire.codecs.bernoulli import _count_table
from thinwire.codecs.draws import in_slabs, kept_channels, permuted_channels, unmarked
from thinwire.core.errors import UserError
from thinwire.core.keys import TokenKeys

EMPTY = CodecState(0, {})


def keys(num, step=1):
    return TokenKeys(7, step, torch.arange(num), torch.arange(num) % 11)


def errors(codec, hidden_D, num=4000, state=EMPTY):
    """||h~ - h||^2 for the same h under `num` keys, float64."""
    hidden_ND = hidden_D.expand(num, -1).contiguous()
    crossed_ND = cross(hidden_ND, codec, codec.draw(keys(num), 0), state)
    return (crossed_ND - hidden_ND).double().square().sum(-1)


def assert_mean(values, expected, rounding=2.0**-8):
    """Within 6 standard errors; bf16 payloads move a squared error by about 2^-8 of it at most."""
    bound = 6 * values.std() / len(values) ** 0.5 + rounding * expected
    assert abs(values.mean() - expected) <= bound


@pytest.fixture
def hidden_D():
    return torch.randn(64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("width", "keep"), [(1536, 77), (576, 29), (128, 6), (64, 32), (7, 1)])
def test_the_bernoulli_coin_is_the_largest_whose_overflow_the_payload_bears(width, keep):
    """Against scipy's binomial; the table is exact to 2^-32 a threshold, scipy's sums to about 1e-12."""
    thresholds, share = _count_table(width, keep, 1e-9)
    coin = Bernoulli(keep=keep).at_width(width).coin
    assert stats.binom.sf(keep, width, coin) == pytest.approx(1e-9, rel=1e-9)
    expected = stats.binom.cdf(range(keep), width, coin)
    np.testing.assert_allclose(np.array(thresholds) / 2.0**32, expected, rtol=0, atol=1e-9)
    kept = sum(min(count, keep) * stats.binom.pmf(count, width, coin) for count in range(width + 1))
    assert share == pytest.approx(kept / width, abs=2.0**-31)


def test_a_bernoulli_token_uses_as_many_slots_as_its_coins_say_and_fills_the_rest_with_zeros():
    codec = Bernoulli(keep=20).at_width(64)
    _, unused_NK = unmarked(codec.draw(keys(4000), 0))
    counts = (~unused_NK).sum(-1).double()
    assert_mean(counts, 64 * codec.kept_share, rounding=0)
    spread = 64 * codec.coin * (1 - codec.coin)
    assert_mean((counts - 64 * codec.coin).square(), spread, rounding=0)
    (values_NK,) = codec.encode(torch.ones(4000, 64), codec.draw(keys(4000), 0), EMPTY)
    assert torch.equal(values_NK != 0, ~unused_NK)


@pytest.mark.parametrize("overflow", [1e-9, 0.4])
def test_bernoulli_error_is_one_over_pi_minus_one_even_where_tokens_often_overflow(overflow, hidden_D):
    codec = Bernoulli(keep=20, overflow=overflow).at_width(64)
    square = float(hidden_D.square().sum())
    assert_mean(errors(codec, hidden_D), (1 / codec.kept_share - 1) * square)
    hidden_ND = hidden_D.expand(4000, -1).contiguous()
    crossed_ND = cross(hidden_ND, codec, codec.draw(keys(4000), 0), EMPTY)
    for channel in range(64):
        assert_mean(crossed_ND[:, channel].double(), float(hidden_D[channel]), rounding=0.01)


def test_a_bernoulli_payload_with_a_slot_for_every_channel_sends_everything():
    codec = Bernoulli(keep=9).at_width(9)
    hidden_ND = torch.randn(5, 9)
    assert torch.equal(cross(hidden_ND, codec, codec.draw(keys(5), 0), EMPTY), hidden_ND.bfloat16().float())


@pytest.mark.parametrize("pairs", ["positions", "samples", "steps"])
@pytest.mark.parametrize(("width", "keep"), [(20, 1), (20, 7), (20, 10), (20, 13), (20, 20), (1, 1)])
def test_the_sets_of_a_pair_overlap_as_little_as_two_k_sets_can(width, keep, pairs):
    codec = Antithetic(keep=keep, pairs=pairs).at_width(width)
    even, odd = (pair_keys(pairs, member, 50) for member in (0, 1))
    sets = [codec.draw(member, 0).tolist() for member in (even, odd)]
    for first, second in zip(*sets, strict=True):
        assert len(set(first)) == len(set(second)) == keep
        assert len(set(first) & set(second)) == max(0, 2 * keep - width)


def pair_keys(pairs, member, num):
    """Even or odd members of `num` pairs."""
    place = 2 * torch.arange(num) + member
    still = torch.full((num,), 3)
    step, sample, position = {
        "positions": (4, still, place),
        "samples": (4, place, still),
        "steps": (4 + member, torch.arange(num), still),
    }[pairs]
    return TokenKeys(7, step, sample, position)


def test_each_set_of_a_pair_alone_is_uniform():
    """Chi-square over the 15 pairs out of 6 channels, 3000 draws each: refused at 1e-6."""
    codec = Antithetic(keep=2).at_width(6)
    for member in (0, 1):
        draws = codec.draw(pair_keys("positions", member, 3000), 0).sort(-1).values
        _, counts = (draws[:, 0] * 6 + draws[:, 1]).unique(return_counts=True)
        assert len(counts) == 15
        assert stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("keep", [8, 32, 40])
def test_equal_inputs_of_a_pair_have_the_antithetic_mean_error(keep, hidden_D):
    """K = D / 2: the error of the pair's mean is nothing but rounding. Below, 1/2 ||h||^2 less than apart."""
    codec = Antithetic(keep=keep).at_width(64)
    square = float(hidden_D.square().sum())
    num = 3000
    pair = [
        cross(hidden_D.expand(num, -1).contiguous(), codec, codec.draw(member, 0), EMPTY).double()
        for member in (pair_keys("positions", 0, num), pair_keys("positions", 1, num))
    ]
    mean_errors = ((pair[0] + pair[1]) / 2 - hidden_D).square().sum(-1)
    fraction = (2 * keep / 64) % 1
    expected = (64 / (2 * keep)) ** 2 * fraction * (1 - fraction) * square
    if keep == 32:
        assert mean_errors.max() <= 2.0**-16 * square
        return
    assert_mean(mean_errors, expected)
    if keep < 32:
        assert expected == pytest.approx((64 / keep - 1) / 2 * square - square / 2)


def test_the_errors_of_a_pair_with_different_inputs_have_minus_their_product(hidden_D):
    codec, num = Antithetic(keep=8).at_width(64), 6000
    other_D = hidden_D + 0.5 * torch.randn(64, generator=torch.Generator().manual_seed(4))
    apart = []
    for member, values_D in ((0, hidden_D), (1, other_D)):
        draw = codec.draw(pair_keys("positions", member, num), 0)
        crossed_ND = cross(values_D.expand(num, -1).contiguous(), codec, draw, EMPTY)
        apart.append((crossed_ND - values_D).double())
    assert_mean(-(apart[0] * apart[1]).sum(-1), float((hidden_D * other_D).sum()))


def in_float64(monkeypatch, module):
    """Payloads and arithmetic in float64, so that a mean over all subsets is exact."""
    monkeypatch.setattr(module, "PAYLOAD_DTYPE", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def every_subset(codec, values_D, state, direction="forward"):
    """The decoded vectors over all K-subsets of the channels."""
    decoded = []
    for subset in itertools.combinations(range(codec.hidden_dim), codec.keep):
        draw = torch.tensor([subset])
        if direction == "forward":
            decoded.append(codec.decode(codec.encode(values_D[None], draw, state), draw, state)[0])
        else:
            sent = codec.encode_gradient(values_D[None], draw, state)
            decoded.append(codec.decode_gradient(sent, draw, state)[0])
    return torch.stack(decoded)


def test_rms_matched_keeps_the_length_and_errs_by_two_times_one_minus_the_mean_kept_share(monkeypatch):
    """All C(6, 2) subsets in float64: 1e-12 covers the sums."""
    in_float64(monkeypatch, rms_module)
    codec = RmsMatched(keep=2).at_width(6)
    hidden_D = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.1, 1.5], dtype=torch.float64)
    decoded = every_subset(codec, hidden_D, EMPTY)
    torch.testing.assert_close(decoded.norm(dim=-1), hidden_D.norm().expand(15), rtol=1e-12, atol=0)
    rho = torch.stack(
        [hidden_D[list(s)].norm() / hidden_D.norm() for s in itertools.combinations(range(6), 2)]
    )
    error = (decoded - hidden_D).square().sum(-1).mean()
    expected = 2 * (1 - rho.mean()) * hidden_D.square().sum()
    torch.testing.assert_close(error, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(rho.square().mean(), torch.tensor(2 / 6, dtype=torch.float64))
    flat = every_subset(codec, torch.ones(6, dtype=torch.float64), EMPTY)
    torch.testing.assert_close(flat.mean(0), torch.full((6,), (2 / 6) ** 0.5, dtype=torch.float64))


def test_rms_matched_has_nothing_to_rescale_where_every_kept_channel_is_zero():
    codec, hidden_ND = RmsMatched(keep=1).at_width(3), torch.tensor([[0.0, 0.0, 5.0]])
    for channel, expected in ((0, 0.0), (2, 5.0)):
        crossed_ND = cross(hidden_ND, codec, torch.tensor([[channel]]), EMPTY)
        assert crossed_ND[0].tolist() == [0.0, 0.0, expected]


def test_rms_matched_keeps_the_channels_that_exact_k_keeps():
    drawn = [kind(keep=5).at_width(40).draw(keys(9), 2) for kind in (RmsMatched, ExactK)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("residual", ["unbiased", "biased"])
def test_low_rank_residual_over_every_subset_has_its_mean_and_errors(monkeypatch, residual, symmetric):
    """All C(6, 2) subsets in float64, both directions, with a basis of one direction; 1e-12 covers sums."""
    in_float64(monkeypatch, low_rank_module)
    codec = LowRankResidual(subspace_dim=1, keep=2, residual=residual, symmetric=symmetric).at_width(6)
    generator = torch.Generator().manual_seed(1)
    basis_DR = torch.linalg.qr(torch.randn(6, 1, generator=generator, dtype=torch.float64))[0]
    state = CodecState(1, {"basis_DR": basis_DR})
    hidden_D = torch.randn(6, generator=generator, dtype=torch.float64)
    projector = basis_DR @ basis_DR.T
    left_D = hidden_D - projector @ hidden_D
    decoded = {way: every_subset(codec, hidden_D, state, way) for way in ("forward", "backward")}

    def close(got, expected):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    error = {way: (got - hidden_D).square().sum(-1).mean() for way, got in decoded.items()}
    if residual == "biased":
        if not symmetric:
            close(decoded["forward"].mean(0), projector @ hidden_D + (2 / 6) * left_D)
            close(error["forward"], (1 - 2 / 6) * left_D.square().sum())
        assert codec.unbiased == frozenset()
        return
    for got in decoded.values():
        close(got.mean(0), hidden_D)
    plain = (6 / 2 - 1) * left_D.square().sum()

    def projected(values_D, outside_D):
        kept = (1 - projector.diagonal()) * values_D.square()
        return (6 / 2 - 1) / (6 - 1) * (6 * kept.sum() - outside_D.square().sum())

    close(error["forward"], projected(left_D, left_D) if symmetric else plain)
    close(error["backward"], projected(left_D if symmetric else hidden_D, left_D))
    assert projected(left_D, left_D) < plain


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("residual", ["unbiased", "biased"])
def test_every_variant_sends_gradients_through_its_adjoint(residual, symmetric):
    """Row i of the matrices is the image of channel i, forward and backward: one is the other transposed, up
    to bf16: 2^-9 of entries up to D / K = 3 and as much again for the product."""
    codec = LowRankResidual(subspace_dim=2, keep=2, residual=residual, symmetric=symmetric).at_width(6)
    state, draw = codec.initial_state(1, 0), codec.draw(keys(1), 0).expand(6, -1)
    eye_DD = torch.eye(6, requires_grad=True)
    forward_DD = cross(eye_DD, codec, draw, state)
    (backward_DD,) = torch.autograd.grad(forward_DD, eye_DD, torch.eye(6))
    torch.testing.assert_close(backward_DD, forward_DD.detach().T, rtol=0, atol=6 * 2.0**-8)
    asymmetry = (forward_DD - forward_DD.T).abs().max()
    assert asymmetry < 0.05 if symmetric else asymmetry > 0.1


def test_the_reference_split_of_rank_and_residual():
    for width, split, bits in ((1536, (48, 28), 1216), (576, (18, 10), 448), (128, (4, 2), 96)):
        codec = LowRankResidual().at_width(width)
        assert (codec.subspace_dim, codec.keep) == split
        assert codec.wire_bits(torch.bfloat16) == bits
    assert LowRankResidual(subspace_dim=18).at_width(576).keep == 11
    assert LowRankResidual(keep=29).at_width(1536).subspace_dim == 48


def test_a_low_rank_residual_learns_the_basis_that_subspace_learns():
    hidden = torch.randn(300, 24) * torch.logspace(0, -2, 24)
    moments = Moments(300, hidden.sum(0), hidden.T @ hidden)
    codec = LowRankResidual(subspace_dim=3, keep=2).at_width(24)
    state = codec.learn(codec.initial_state(1, 0), moments, 1)
    tail = hidden - hidden @ state.tensors["basis_DR"] @ state.tensors["basis_DR"].T
    assert tail.square().sum() < 0.5 * hidden.square().sum()
    assert_mean(
        errors(codec, hidden[0], state=state), (24 / 2 - 1) * float(tail[0].square().sum()), rounding=0.02
    )


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (Bernoulli(overflow=0.0), r"codec.overflow must be inside \(0, 1\), got 0"),
        (Bernoulli(keep=129), "codec.keep must be in 1..128"),
        (Antithetic(keep=3, bits_per_value=0.8), "give one"),
        (LowRankResidual(subspace_dim=4, keep=2, bits_per_value=0.8), "give one"),
        (LowRankResidual(subspace_dim=6), "do not make a budget of 6 values"),
        (LowRankResidual(keep=7), "do not make a budget of 6 values"),
        (LowRankResidual(subspace_dim=129, keep=1), "codec.subspace_dim must be in 0..128"),
        (LowRankResidual(subspace_dim=1, keep=0), "codec.keep must be in 1..128"),
        (LowRankResidual(power_iterations=0), "codec.power_iterations"),
    ],
)
def test_a_setting_that_does_not_fit_the_width_is_refused_by_name(codec, words):
    with pytest.raises(UserError, match=words):
        codec.at_width(128)


def test_slabs_change_nothing(monkeypatch):
    monkeypatch.setattr("thinwire.codecs.draws._SLAB_WORDS", 12)
    grid = TokenKeys(7, 1, torch.arange(3)[:, None], torch.arange(5)[None, :])
    whole = permuted_channels(grid, 0, 9, 4)
    assert torch.equal(in_slabs(grid, 4, lambda slab: permuted_channels(slab, 0, 9, 4)), whole)


@pytest.mark.parametrize("width", [1, 9, 40_000])
def test_kept_channels_are_distinct_ascending_and_all_of_them_where_asked(width):
    for num in {1, min(width, 5), width}:
        kept = kept_channels(keys(3), 0, width, num).long()
        assert kept.shape == (3, num)
        assert (kept.diff() > 0).all()
        assert ((kept >= 0) & (kept < width)).all()
