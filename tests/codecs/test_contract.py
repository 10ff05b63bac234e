"""The contract every codec in CODECS passes: bytes, adjoint, draws, views. A new codec joins by being there.

What numbers it must bear and what it may spend: test_contract_numbers.py and test_contract_budget.py.
Letters: N tokens, D hidden size, K values sent per token.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.helpers import DTYPES, every_codec, keys, learned
from thinwire.codecs import CodecState, cross, publish
from thinwire.core.errors import NonFinite
from thinwire.core.keys import TokenKeys

WIDTHS = (1, 2, 7, 24, 33, 128)


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
    whole = payload.buffer_NB
    for wrong in (whole[:, :-1], torch.nn.functional.pad(whole, (0, 1)), whole.to(torch.int16)):
        for direction in ("forward", "backward"):
            with pytest.raises(ValueError, match="bytes a token"):
                codec.unpack(replace(payload, buffer_NB=wrong, direction=direction), state, torch.float32)


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
