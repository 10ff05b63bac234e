"""What every codec in CODECS does with any shape, type and norm, and on average over its keys.

Letters: N tokens, D hidden size.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.helpers import DTYPES, every_codec, keys, learned, shape_keys, spending, tokens
from thinwire.codecs import CODECS, cross
from thinwire.core.keys import TokenKeys


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
    """Exact: floating payloads and scales have fp32's exponents, codes do not see the exponent at all. Not
    asked of codecs that have learned a level: theirs is a range about it."""
    codec = spending(kind, bits).at_width(33)
    if codec.learns and not codec.is_linear:
        return
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
    """The control of the test above: its bound is narrow enough to tell these from unbiased ones. A learned
    quantiser gets 2 bits a value: with 8 its bias is below what its bf16 matrices round."""
    hidden_D = tokens((), 24, torch.float32, seed=3)
    codec = spending(kind, 8.0).at_width(24)
    if codec.learns and not codec.is_linear:
        codec = spending(kind, 2.0).at_width(24)
    deviation_D, bound_D = mean_deviation(codec, hidden_D, direction)
    assert (deviation_D > bound_D).any()
