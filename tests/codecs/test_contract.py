"""The contract every codec in CODECS passes. A new codec joins by being in that list.

Letters: N tokens, D hidden size, K values sent per token.
"""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.codecs import CODECS, CodecState, ExactK, Moments, cross, publish
from thinwire.core.errors import NonFinite, UserError
from thinwire.core.keys import TokenKeys

WIDTHS = (1, 2, 7, 24, 33, 128)
every_codec = pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.model_fields["name"].default)
compressing = pytest.mark.parametrize(
    "kind",
    [kind for kind in CODECS if "bits_per_value" in kind.model_fields],
    ids=lambda kind: kind.model_fields["name"].default,
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def spending(kind, bits_per_value):
    """The codec at a budget; identity has none to set."""
    takes_budget = "bits_per_value" in kind.model_fields and bits_per_value is not None
    return kind(bits_per_value=bits_per_value) if takes_budget else kind()


def tokens(shape, width, dtype, scale=1.0, massive=False, seed=0):
    """Normal hidden states, one channel 1e4 times the others if asked, none beyond the range of `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(*shape, width, generator=generator) * scale
    if massive:
        hidden_ND[..., width // 2] *= 1e4
    limit = torch.finfo(dtype).max
    return hidden_ND.clamp(-limit, limit).to(dtype)


def shape_keys(shape):
    count_N = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return TokenKeys(5, 1, count_N, count_N * 3 + 2)


def learned(codec, seed=0):
    """A state as an anchor leaves it, for codecs that learn; the initial one for others."""
    torch.manual_seed(seed)
    hidden = torch.randn(200, codec.hidden_dim)
    moments = Moments(200, hidden.sum(0), hidden.T @ hidden)
    return codec.learn(codec.initial_state(seed, 0), moments, version=1)


def keys(num, step=1, first=0):
    return TokenKeys(5, step, torch.arange(first, first + num), torch.arange(num) + 2)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_packed_bytes_decode_to_the_bits_of_the_simulated_path(kind, width, dtype):
    codec = kind().at_width(width)
    state, draw = learned(codec), codec.draw(keys(9), 0)
    hidden_ND = torch.randn(9, width).to(dtype)
    payload = codec.pack(codec.encode(hidden_ND, draw, state), state, dtype)
    assert payload.buffer_NB.dtype == torch.uint8
    assert payload.buffer_NB.shape == (9, codec.wire_bits(dtype) // 8)
    decoded_ND = codec.decode(codec.unpack(payload, state, dtype), draw, state).to(dtype)
    assert torch.equal(decoded_ND, cross(hidden_ND, codec, draw, state))


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_packed_gradients_decode_to_the_bits_of_the_simulated_path(kind, width, dtype):
    codec = kind().at_width(width)
    state, draw = learned(codec), codec.draw(keys(9), 0)
    hidden_ND = torch.randn(9, width).to(dtype).requires_grad_()
    gradient_ND = torch.randn(9, width).to(dtype)
    sent = codec.encode_gradient(gradient_ND, draw, state)
    payload = codec.pack(sent, state, dtype, "backward")
    assert payload.buffer_NB.shape == (9, codec.wire_bits(dtype) // 8)
    decoded_ND = codec.decode_gradient(codec.unpack(payload, state, dtype), draw, state).to(dtype)
    crossed_ND = cross(hidden_ND, codec, draw, state)
    (simulated_ND,) = torch.autograd.grad(crossed_ND, hidden_ND, gradient_ND)
    assert torch.equal(decoded_ND, simulated_ND)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_with_boundary_and_direction_named(kind, bad):
    codec = kind().at_width(8)
    view = publish(codec, [learned(codec), learned(codec)], seed=1, step=3)
    hidden_BTD = torch.randn(2, 3, 8, requires_grad=True)
    crossed_BTD = view.cross(hidden_BTD, 1, torch.arange(2))
    broken_BTD = torch.ones(2, 3, 8)
    broken_BTD[1, 2, 3] = bad
    with pytest.raises(NonFinite, match="boundary/1/backward"):
        crossed_BTD.backward(broken_BTD)
    with pytest.raises(NonFinite, match="boundary/1/forward"):
        view.cross(broken_BTD, 1, torch.arange(2))


@every_codec
@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 40), num=st.integers(0, 5), seed=st.integers(0, 100))
def test_the_backward_map_is_the_adjoint_of_the_forward_map(kind, width, num, seed):
    """<C x, y> = <x, C^T y> up to the payload's rounding: bf16 moves each sent value by at most 2^-9 of it,
    on either side, so the two products differ by at most 2 x 2^-9 x ||C|| ||x|| ||y||, ||C|| <= D; half
    as much again and 1e-6 cover the fp32 sums."""
    codec = kind().at_width(width)
    if not codec.is_linear:
        return
    state, draw = learned(codec, seed), codec.draw(keys(num), 0)
    torch.manual_seed(seed)
    x_ND = torch.randn(num, width, requires_grad=True)
    y_ND = torch.randn(num, width)
    crossed_ND = cross(x_ND, codec, draw, state)
    (adjoint_ND,) = torch.autograd.grad(crossed_ND, x_ND, y_ND)
    left = (crossed_ND.detach().double() * y_ND).sum(-1)
    right = (x_ND.detach().double() * adjoint_ND).sum(-1)
    scale = x_ND.detach().norm(dim=-1) * y_ND.norm(dim=-1) * width
    assert ((left - right).abs() <= 1.5 * 2.0**-8 * scale + 1e-6).all()


@every_codec
def test_a_draw_is_the_same_under_permutation_batching_and_other_tokens(kind):
    codec = kind().at_width(24)
    whole = codec.draw(keys(10), 1)
    if whole is None:
        assert codec.draw(keys(3), 1) is None
        return
    part = TokenKeys(5, 1, torch.arange(4, 7), torch.arange(4, 7) + 2)
    assert torch.equal(whole[4:7], codec.draw(part, 1))
    order = torch.tensor([9, 0, 3, 3])
    shuffled = TokenKeys(5, 1, torch.arange(10)[order], (torch.arange(10) + 2)[order])
    assert torch.equal(whole[order], codec.draw(shuffled, 1))
    assert not torch.equal(whole, codec.draw(keys(10, step=2), 1))
    assert not torch.equal(whole, codec.draw(keys(10), 2))


@every_codec
def test_encoding_one_token_does_not_depend_on_its_neighbours(kind):
    """Bitwise for elementwise codecs; a matrix product over another number of rows may sum in another
    order, so learned codecs are compared to one bf16 step."""
    codec = kind().at_width(24)
    state, draw = learned(codec), codec.draw(keys(6), 0)
    hidden_ND = torch.randn(6, 24)
    whole = codec.encode(hidden_ND, draw, state)
    alone = codec.encode(hidden_ND[2:3], None if draw is None else draw[2:3], state)
    for all_NV, one_NV in zip(whole, alone, strict=True):
        if codec.learns:
            torch.testing.assert_close(all_NV[2:3], one_NV, rtol=2.0**-7, atol=1e-6)
        else:
            assert torch.equal(all_NV[2:3], one_NV)


@every_codec
def test_no_tokens_give_no_bytes(kind):
    codec = kind().at_width(8)
    state, draw = learned(codec), codec.draw(keys(0), 0)
    assert (
        codec.pack(codec.encode(torch.zeros(0, 8), draw, state), state, torch.float32).buffer_NB.shape[0] == 0
    )


@every_codec
def test_a_zero_token_stays_zero(kind):
    codec = kind().at_width(8)
    state, draw = learned(codec), codec.draw(keys(2), 0)
    assert torch.equal(cross(torch.zeros(2, 8), codec, draw, state), torch.zeros(2, 8))


@every_codec
def test_a_payload_of_another_codec_version_or_length_is_refused(kind):
    codec = kind().at_width(8)
    state, draw = learned(codec), codec.draw(keys(2), 0)
    payload = codec.pack(codec.encode(torch.randn(2, 8), draw, state), state, torch.float32)
    with pytest.raises(ValueError, match="refused"):
        kind().at_width(9).unpack(payload, state, torch.float32)
    with pytest.raises(ValueError, match="version"):
        codec.unpack(payload, CodecState(state.version + 1, state.tensors), torch.float32)
    cut = type(payload)(payload.buffer_NB[:, :-1], payload.fingerprint, payload.version)
    with pytest.raises(ValueError, match="bytes a token"):
        codec.unpack(cut, state, torch.float32)


@every_codec
def test_recomputation_in_backward_gives_the_same_values_and_gradients(kind):
    codec = kind().at_width(16)
    view = publish(codec, [learned(codec)], seed=1, step=3)
    sample_B = torch.arange(3)

    def through(hidden):
        return view.cross(hidden, 0, sample_B).square().sum()

    plain = torch.randn(3, 5, 16, requires_grad=True)
    again = plain.detach().clone().requires_grad_()
    through(plain).backward()
    torch.utils.checkpoint.checkpoint(through, again, use_reentrant=False).backward()
    assert torch.equal(plain.grad, again.grad)


@every_codec
def test_a_view_draws_once_a_step_and_rows_keep_their_draw_under_other_padding(kind):
    codec = kind().at_width(16)
    view = publish(codec, [learned(codec)], seed=1, step=3)
    sample_B = torch.tensor([4, 2])
    first = view.draw(0, sample_B, 6)
    assert view.draw(0, sample_B, 6) is first
    if first is not None:
        assert torch.equal(view.draw(0, torch.tensor([2]), 9)[0, :6], first[1])


@every_codec
@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 70),
    shape=st.sampled_from([(), (1,), (3,), (2, 2), (0,), (2, 0)]),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([None, 16.0]),
    scale=st.sampled_from([1.0, 1e30, 1e-30, 6e4, 0.0]),
    massive=st.booleans(),
)
def test_every_shape_type_budget_and_norm_crosses_finite_and_as_its_bytes_say(
    kind, width, shape, dtype, bits, scale, massive
):
    """16 bits a value lets a mask keep all channels (K = D). 1e30 x 1e4 is as far as finite is promised."""
    codec = spending(kind, bits).at_width(width)
    state, draw = learned(codec), codec.draw(shape_keys(shape), 0)
    hidden_ND = tokens(shape, width, dtype, scale, massive).requires_grad_()
    crossed_ND = cross(hidden_ND, codec, draw, state)
    (gradient_ND,) = torch.autograd.grad(crossed_ND, hidden_ND, hidden_ND.detach())
    for result_ND in (crossed_ND, gradient_ND):
        assert result_ND.shape == hidden_ND.shape
        assert result_ND.dtype == dtype
        assert torch.isfinite(result_ND).all()
        assert scale > 0.0 or not result_ND.any()
    payload = codec.pack(codec.encode(hidden_ND.detach(), draw, state), state, dtype)
    raw = payload.buffer_NB.numpy().tobytes()
    assert 8 * len(raw) == codec.wire_bits(dtype) * torch.Size(shape).numel()
    assert 8 * len(raw) == pytest.approx(codec.wire_bits_per_value(dtype) * width * torch.Size(shape).numel())
    received = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
    arrived = type(payload)(received.reshape(payload.buffer_NB.shape), payload.fingerprint, payload.version)
    decoded_ND = codec.decode(codec.unpack(arrived, state, dtype), draw, state)
    limit = torch.finfo(dtype).max
    assert torch.equal(decoded_ND.clamp(-limit, limit).to(dtype), crossed_ND)


@every_codec
@pytest.mark.parametrize("power", [90, -90])
@pytest.mark.parametrize("bits", [None, 8.0])
def test_a_token_times_a_power_of_two_decodes_to_the_result_times_it(kind, bits, power):
    """Exact: floating payloads and scales have fp32's exponents, codes do not see the exponent at all."""
    codec = spending(kind, bits).at_width(33)
    state, draw = learned(codec), codec.draw(keys(6), 0)
    hidden_ND = tokens((6,), 33, torch.float32, massive=True)
    scaled_ND = cross(hidden_ND * 2.0**power, codec, draw, state)
    assert torch.equal(scaled_ND, cross(hidden_ND, codec, draw, state) * 2.0**power)


@every_codec
@pytest.mark.parametrize("bits", [None, 8.0])
def test_a_token_crosses_the_same_alone_in_a_row_and_with_other_rows(kind, bits):
    """Forward and backward. Bitwise, except for matrix products over another number of rows: one bf16 step
    of the largest value there."""
    codec = spending(kind, bits).at_width(24)
    state = learned(codec)
    hidden_ND, whole = tokens((6,), 24, torch.float32).requires_grad_(), codec.draw(keys(6), 0)
    alone_ND = hidden_ND.detach()[2:3].requires_grad_()
    part = codec.draw(TokenKeys(5, 1, torch.tensor([2]), torch.tensor([4])), 0)
    results = []
    for values_ND, draw in ((hidden_ND, whole), (alone_ND, part)):
        crossed_ND = cross(values_ND, codec, draw, state)
        (gradient_ND,) = torch.autograd.grad(crossed_ND, values_ND, values_ND.detach())
        results.append((crossed_ND.detach(), gradient_ND))
    for all_ND, one_ND in zip(*results, strict=True):
        if codec.learns:
            step = 2.0**-7 * float(all_ND.abs().max())
            torch.testing.assert_close(all_ND[2:3], one_ND, rtol=0, atol=step)
        else:
            assert torch.equal(all_ND[2:3], one_ND)


def mean_deviation(codec, hidden_D, direction, num_keys=4096):
    """(|mean - h|, 6 standard errors + rounding) over keys, per channel.

    The mean of 4096 draws is off by more than 6 of its standard errors with a chance of 2e-9 a channel.
    Rounding of values sent in bf16: 2^-9 |h_i| for a mask; through a basis at most 2 x 2^-9 ||h||.
    """
    state, draw = learned(codec), codec.draw(keys(num_keys), 0)
    hidden_ND = hidden_D.expand(num_keys, -1).clone().requires_grad_()
    decoded_ND = cross(hidden_ND, codec, draw, state)
    if direction == "backward":
        (decoded_ND,) = torch.autograd.grad(decoded_ND, hidden_ND, hidden_ND.detach())
    decoded_ND = decoded_ND.detach().double()
    rounding_D = 2.0**-8 * hidden_D.norm() if codec.learns else 2.0**-9 * hidden_D.abs()
    error_D = decoded_ND.std(0) / num_keys**0.5
    return (decoded_ND.mean(0) - hidden_D).abs(), 6.0 * error_D + rounding_D


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize(
    ("kind", "direction"),
    [(kind, way) for kind in CODECS for way in sorted(kind().at_width(24).unbiased)],
    ids=lambda value: value if isinstance(value, str) else value.model_fields["name"].default,
)
def test_the_mean_over_keys_is_what_was_sent_where_unbiased_is_declared(kind, direction, massive):
    hidden_D = tokens((), 24, torch.float32, massive=massive, seed=3)
    deviation_D, bound_D = mean_deviation(spending(kind, 8.0).at_width(24), hidden_D, direction)
    assert (deviation_D <= bound_D).all()


@pytest.mark.parametrize("kind", [kind for kind in CODECS if not kind().at_width(24).unbiased])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_check_of_the_mean_finds_every_codec_that_declares_a_bias(kind, direction):
    """The control of the test above: its bound is narrow enough to tell these from unbiased ones."""
    hidden_D = tokens((), 24, torch.float32, seed=3)
    deviation_D, bound_D = mean_deviation(spending(kind, 8.0).at_width(24), hidden_D, direction)
    assert (deviation_D > bound_D).any()


@compressing
def test_default_settings_fit_every_width_and_never_exceed_exact_ks_bits(kind):
    for width in (*range(1, 200), 576, 896, 1536, 2048, 4096, 8192, 40_000):
        reference_bits = ExactK().at_width(width).wire_bits(torch.bfloat16)
        assert 8 <= kind().at_width(width).wire_bits(torch.bfloat16) <= reference_bits


@compressing
@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 600), bits=st.floats(0.001, 16.0))
def test_a_budget_is_never_exceeded_and_one_that_is_too_small_is_told_the_smallest(kind, width, bits):
    codec = kind(bits_per_value=bits)
    words = refusal(codec, width)
    if words is None:
        bound = codec.at_width(width)
        assert bound.wire_bits_per_value(torch.bfloat16) <= bits + 1e-9
        assert bound.at_width(width) == bound
        return
    found = re.search(r"sends (\d+) at least: set codec.bits_per_value = ([\d.]+) or more", words)
    assert found, words
    least = kind(bits_per_value=float(found[2])).at_width(width)
    assert bits * width < int(found[1]) == least.wire_bits(torch.bfloat16)


def refusal(codec, width):
    """The words that a codec refuses a width with, or None."""
    try:
        codec.at_width(width)
    except UserError as error:
        return str(error)
    return None


@compressing
def test_a_budget_changes_between_steps_only_where_the_codec_says_so(kind):
    codec = kind().at_width(128)
    if not codec.can_change_bits:
        with pytest.raises(ValueError, match="cannot change between steps"):
            codec.with_bits(2.0)
        return
    wider = codec.with_bits(2.0)
    assert codec.wire_bits(torch.float32) < wider.wire_bits(torch.float32) <= 256
    assert wider.at_width(128) == wider


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return made


@every_codec
@pytest.mark.parametrize("width", [576, 1536])
def test_nothing_larger_than_three_activations_in_fp32_is_allocated_and_the_draw_is_below_one(kind, width):
    codec, num = kind().at_width(width), 32
    state, hidden_ND = codec.initial_state(1, 0), torch.randn(num, width, requires_grad=True)
    activation_bytes = 4 * num * width
    with LargestAllocation() as largest:
        draw = codec.draw(keys(num), 0)
        cross(hidden_ND, codec, draw, state).sum().backward()
    assert largest.num_bytes <= max(3 * activation_bytes, state.num_bytes())
    assert draw is None or draw.numel() * draw.element_size() <= activation_bytes
