"""The shaped codec: its error against theory, what the weight does, what it learns and what it sends."""

import pytest
import torch

from tests.codecs.helpers import keys, moments_of
from thinwire.codecs import CodecState, Shaped, cross
from thinwire.codecs import transform_coding as coding
from thinwire.core.errors import NonFinite, UserError

WIDTH = 64


def sample(num, seed, decay=0.8):
    """Normal tokens with a falling spectrum in a random frame, about a mean."""
    generator = torch.Generator().manual_seed(seed)
    frame, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)))
    spread = decay ** torch.arange(WIDTH)
    return (torch.randn(num, WIDTH, generator=generator) * spread) @ frame.T + 3.0


def taught(codec, hidden=None, gradient=None, version=1, state=None):
    hidden = sample(4000, 1) if hidden is None else hidden
    back = None if gradient is None else moments_of(gradient)
    state = codec.initial_state(1, 0) if state is None else state
    return codec.learn(state, moments_of(hidden), version, back)


def test_the_error_is_the_sum_of_variances_times_lloyd_max_errors():
    """Independent directions, 4000 tokens: 5% covers the sample, the gain's 9% steps and its own noise."""
    codec = Shaped(bits_per_value=2.0, sensitivity=0.0).at_width(WIDTH)
    state, hidden_ND = taught(codec), sample(4000, 2)
    error = (cross(hidden_ND, codec, codec.draw(keys(4000), 0), state) - hidden_ND).square().sum(-1).mean()
    variance_D = torch.linalg.eigvalsh(torch.cov(hidden_ND.T).double()).flip(0)
    bits_M = state.tensors["forward_bits_M"].tolist()
    bits_D = bits_M + [0] * (WIDTH - len(bits_M))
    expected = sum(v * coding.distortions()[b] for v, b in zip(variance_D.tolist(), bits_D, strict=True))
    assert float(error) == pytest.approx(expected, rel=0.05)


def test_the_weight_moves_the_error_away_from_where_gradients_are():
    gradient_ND = torch.zeros(500, WIDTH)
    gradient_ND[:, :6] = torch.randn(500, 6, generator=torch.Generator().manual_seed(4)) * 1e-4
    hidden_ND = sample(2000, 2, decay=0.95)
    seen, whole = [], []
    for sensitivity in (0.0, 0.9):
        codec = Shaped(bits_per_value=1.0, sensitivity=sensitivity).at_width(WIDTH)
        state = taught(codec, sample(4000, 1, decay=0.95), gradient_ND)
        error_ND = cross(hidden_ND, codec, codec.draw(keys(2000), 0), state) - hidden_ND
        seen.append(float(error_ND[:, :6].square().sum()))
        whole.append(float(error_ND.square().sum()))
    assert seen[1] < 0.2 * seen[0]
    assert whole[1] > whole[0]


def test_the_backward_basis_is_that_of_the_gradients():
    """A gradient of rank 3 loses little to 64 bits: 0.5% of its square, most of it the gain's 9% steps."""
    generator = torch.Generator().manual_seed(5)
    gradient_ND = torch.randn(600, 3, generator=generator) @ torch.randn(3, WIDTH, generator=generator) * 1e-5
    codec = Shaped(bits_per_value=1.0).at_width(WIDTH)
    state = taught(codec, gradient=gradient_ND)
    hidden_ND = sample(600, 2).requires_grad_()
    crossed_ND = cross(hidden_ND, codec, codec.draw(keys(600), 0), state)
    (back_ND,) = torch.autograd.grad(crossed_ND, hidden_ND, gradient_ND)
    assert (back_ND - gradient_ND).square().sum() < 0.005 * gradient_ND.square().sum()


def test_the_error_of_one_token_points_elsewhere_at_every_key():
    """Mean error over 2000 keys: its square is that of what has no bits and of the shrinkage, the rest
    averages out; without keys it would be the whole error."""
    codec = Shaped(bits_per_value=4.0, sensitivity=0.0).at_width(WIDTH)
    state, hidden_D = taught(codec, sample(4000, 1, decay=0.99)), sample(1, 7, decay=0.99)[0]
    error_ND = cross(hidden_D.expand(2000, -1), codec, codec.draw(keys(2000), 0), state) - hidden_D
    assert error_ND.mean(0).square().sum() < 0.2 * error_ND.square().sum(-1).mean()


def test_moments_run_with_the_memory_that_is_set():
    codec = Shaped(memory=0.5).at_width(WIDTH)
    first, second = sample(30, 1), sample(50, 2)
    state = taught(codec, second, version=2, state=taught(codec, first))
    expected = 0.5 * first.T @ first + second.T @ second
    torch.testing.assert_close(state.tensors["own_forward_second_DD"], expected, rtol=1e-5, atol=1e-3)
    assert float(state.tensors["own_forward_tokens"]) == 65.0
    mean_D = (0.5 * first.sum(0) + second.sum(0)) / 65
    torch.testing.assert_close(state.tensors["mean_D"], mean_D, rtol=1e-5, atol=1e-5)


def test_a_fire_without_any_gradient_keeps_the_backward_transform():
    codec = Shaped().at_width(WIDTH)
    before = taught(codec, gradient=torch.randn(50, WIDTH))
    after = taught(codec, gradient=torch.zeros(50, WIDTH), version=2, state=before)
    for name in ("backward_decode_MD", "own_backward_encode_DM", "backward_bits_M", "own_backward_tokens"):
        assert torch.equal(before.tensors[name], after.tensors[name])
    untaught = taught(codec, gradient=torch.zeros(50, WIDTH))
    start = codec.initial_state(1, 0)
    assert torch.equal(untaught.tensors["backward_decode_MD"], start.tensors["backward_decode_MD"])


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_a_singular_covariance_is_learned_from(num_tokens):
    codec = Shaped().at_width(WIDTH)
    hidden_ND = sample(num_tokens, 1)
    state = taught(codec, hidden_ND, gradient=torch.randn(num_tokens, WIDTH))
    crossed_ND = cross(hidden_ND, codec, codec.draw(keys(num_tokens), 0), state)
    assert torch.isfinite(crossed_ND).all()
    assert (crossed_ND - hidden_ND).norm() < 0.5 * hidden_ND.norm()


def test_moments_that_are_not_finite_are_refused_in_both_directions():
    codec = Shaped().at_width(WIDTH)
    good, bad = sample(10, 1), sample(10, 1)
    bad[0, 0] = torch.nan
    for hidden, gradient in ((bad, None), (good, bad)):
        with pytest.raises(NonFinite, match="anchor/moments"):
            taught(codec, hidden, gradient)


def test_states_keep_their_shapes_and_only_what_the_other_end_needs_is_counted():
    codec = Shaped(bits_per_value=1.0).at_width(WIDTH)
    start, state = codec.initial_state(1, 0), taught(codec, gradient=sample(50, 3))
    assert {n: (t.shape, t.dtype) for n, t in start.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in state.tensors.items()
    }
    num_directions = 28  # two bits each of the 64 - 8 that codes have
    both_ways = 2 * num_directions * (2 * WIDTH + 4 + 1)
    assert state.num_bytes() == both_ways + 4 * WIDTH
    bare = {name: tensor for name, tensor in state.tensors.items() if not name.startswith("own_")}
    hidden_ND, draw = sample(20, 2), codec.draw(keys(20), 0)
    sent = codec.encode(hidden_ND, draw, state)
    bare |= {f"own_{way}_encode_DM": torch.zeros(0) for way in ("forward", "backward")}
    received_ND = codec.decode(sent, draw, CodecState(1, bare))
    assert torch.equal(received_ND, cross(hidden_ND, codec, draw, state))


def test_a_budget_below_two_bytes_is_refused_with_the_least():
    with pytest.raises(UserError, match="16 at least"):
        Shaped(bits_per_value=0.1).at_width(WIDTH)
    assert Shaped(bits_per_value=0.25).at_width(WIDTH).wire_bits(torch.float32) == 16
