"""Identities of exact-k and subspace, and the settings they refuse."""

import itertools

import pytest
import torch

from thinwire.codecs import CodecState, ExactK, Identity, Moments, Subspace, cross, publish
from thinwire.codecs import exact_k as exact_k_module
from thinwire.core.errors import NonFinite, UserError
from thinwire.core.keys import TokenKeys


def test_exact_k_is_unbiased_over_every_subset(monkeypatch):
    """All C(5, 2) subsets are averaged in float64, so the expectation is exact: 1e-14 covers ten adds."""
    monkeypatch.setattr(exact_k_module, "PAYLOAD_DTYPE", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    codec = ExactK(keep=2).at_width(5)
    hidden = torch.tensor([[1.0, -2.0, 0.5, 3.0, 0.1]], dtype=torch.float64)
    state = CodecState(0, {})
    decoded = [
        codec.decode(codec.encode(hidden, torch.tensor([subset]), state), torch.tensor([subset]), state)
        for subset in itertools.combinations(range(5), 2)
    ]
    torch.testing.assert_close(sum(decoded) / len(decoded), hidden, rtol=0, atol=1e-14)
    error = sum((d - hidden).square().sum() for d in decoded) / len(decoded)
    torch.testing.assert_close(error, (5 / 2 - 1) * hidden.square().sum(), rtol=1e-14, atol=0)


def test_exact_k_keeps_exactly_k_channels_scaled_by_d_over_k():
    """D / K = 4 is a power of two, so bf16-representable inputs come through exactly."""
    codec = ExactK(keep=4).at_width(16)
    keys = TokenKeys(1, 1, torch.arange(50), torch.zeros(50, dtype=torch.int64))
    draw, state = codec.draw(keys, 0).long(), CodecState(0, {})
    hidden = torch.randn(50, 16).bfloat16().float()
    decoded = cross(hidden, codec, draw, state)
    assert ((decoded != 0).sum(-1) == 4).all()
    assert torch.equal(decoded.gather(-1, draw), hidden.gather(-1, draw) * 4)


def test_exact_k_with_every_channel_kept_only_rounds():
    codec = ExactK(keep=8).at_width(8)
    keys = TokenKeys(1, 1, torch.arange(5), torch.zeros(5, dtype=torch.int64))
    hidden = torch.randn(5, 8)
    crossed = cross(hidden, codec, codec.draw(keys, 0), CodecState(0, {}))
    assert torch.equal(crossed, hidden.bfloat16().float())


@pytest.mark.parametrize("width", [16, 128, 576])
def test_a_learned_basis_is_orthonormal_to_1e_6(width):
    codec = Subspace().at_width(width)
    hidden = torch.randn(1000, width) * torch.logspace(0, -3, width)
    state = codec.learn(codec.initial_state(1, 0), Moments(1000, hidden.sum(0), hidden.T @ hidden), 1)
    basis = state.tensors["basis_DR"].double()
    rank = codec.values_per_token()
    assert (basis.T @ basis - torch.eye(rank)).abs().max() < 1e-6


def test_a_learned_basis_finds_the_leading_eigenvectors():
    """Spectrum 1, 1/4, 1/16, ...: after 30 warm-started fires the subspace is eigh's, up to fp32."""
    torch.manual_seed(0)
    frame, _ = torch.linalg.qr(torch.randn(12, 12))
    second = frame @ torch.diag(4.0 ** -torch.arange(12)) @ frame.T
    codec = Subspace(subspace_dim=3).at_width(12)
    state = codec.initial_state(1, 0)
    for version in range(1, 31):
        state = codec.learn(state, Moments(1, torch.zeros(12), second), version)
    basis = state.tensors["basis_DR"]
    torch.testing.assert_close(basis @ basis.T, frame[:, :3] @ frame[:, :3].T, rtol=0, atol=1e-5)


def test_what_lies_outside_the_subspace_is_thrown_away():
    codec = Subspace(subspace_dim=2).at_width(6)
    state = codec.initial_state(3, 0)
    basis = state.tensors["basis_DR"]
    outside = torch.randn(4, 6)
    outside = outside - outside @ basis @ basis.T
    assert cross(outside, codec, None, state).abs().max() < 1e-6


def test_true_wire_bits_are_those_of_the_published_runs():
    for width, bits in ((1536, 1232), (576, 464), (128, 96)):
        assert ExactK().at_width(width).wire_bits(torch.float32) == bits
        assert Subspace().at_width(width).wire_bits(torch.bfloat16) == bits
    assert ExactK().at_width(1536).wire_bits_per_value(torch.bfloat16) == pytest.approx(0.802, abs=5e-4)
    assert Identity().at_width(128).wire_bits(torch.bfloat16) == 2048
    assert Subspace().at_width(128).initial_state(1, 0).num_bytes() == 128 * 6 * 4


@pytest.mark.parametrize("bits", [0.8, 1.0, 4.0, 16.0])
def test_a_budget_in_bits_per_value_is_never_exceeded(bits):
    for kind in (ExactK, Subspace):
        codec = kind(bits_per_value=bits).at_width(576)
        assert codec.wire_bits_per_value(torch.float32) <= bits


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (ExactK(keep=129), "codec.keep must be in 1..128"),
        (ExactK(keep=0), "got 0"),
        (Subspace(subspace_dim=200), "codec.subspace_dim must be in 1..128"),
        (ExactK(bits_per_value=0.01), "codec.bits_per_value"),
        (ExactK(keep=3, bits_per_value=0.8), "give one"),
        (Subspace(power_iterations=0), "codec.power_iterations"),
    ],
)
def test_a_setting_that_does_not_fit_the_width_is_refused_by_name(codec, words):
    with pytest.raises(UserError, match=words):
        codec.at_width(128)


def test_statistics_that_are_not_finite_are_refused():
    codec = Subspace().at_width(8)
    with pytest.raises(NonFinite, match="anchor/moments"):
        codec.learn(codec.initial_state(0, 0), Moments(1, torch.zeros(8), torch.full((8, 8), torch.nan)), 1)


def test_a_view_names_codec_states_seed_and_step_in_its_fingerprint():
    codec = Subspace().at_width(8)
    state = codec.initial_state(0, 0)
    other = codec.learn(state, Moments(1, torch.zeros(8), torch.eye(8)), 1)
    views = [
        publish(codec, [state], 1, 1),
        publish(codec, [other], 1, 1),
        publish(codec, [state], 1, 2),
        publish(codec, [state], 2, 1),
        publish(Subspace(subspace_dim=2).at_width(8), [state], 1, 1),
    ]
    assert len({view.fingerprint() for view in views}) == len(views)
    assert publish(codec, [state], 1, 1).fingerprint() == views[0].fingerprint()


def test_the_dense_side_of_a_view_changes_nothing():
    view = publish(ExactK().at_width(8), [CodecState(0, {})], 1, 1).dense()
    hidden = torch.randn(2, 3, 8)
    assert torch.equal(view.cross(hidden, 0, torch.arange(2)), hidden)
