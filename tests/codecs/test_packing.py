"""Bytes of a payload: every layout comes back bit for bit, and its size is the sum of its bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs.packing import bytes_per_token, codes, floats, pack_fields, unpack_fields

fields = st.one_of(
    st.builds(codes, st.integers(0, 9), st.integers(1, 16)),
    st.builds(floats, st.integers(0, 5), st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
)


def values_of(field, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    if field.dtype.is_floating_point:
        return torch.randn(*shape, field.num, generator=generator).to(field.dtype)
    return torch.randint(0, 1 << field.bits, (*shape, field.num), generator=generator, dtype=torch.int32)


@settings(max_examples=100, deadline=None)
@given(
    layout=st.lists(fields, min_size=1, max_size=4),
    shape=st.sampled_from([(0,), (3,), (2, 0), (2, 3)]),
    seed=st.integers(0, 99),
    spare=st.integers(0, 3),
)
def test_every_layout_comes_back_bit_for_bit(layout, shape, seed, spare):
    sent = tuple(values_of(field, shape, seed + i) for i, field in enumerate(layout))
    num_bytes = bytes_per_token(layout) + spare
    buffer = pack_fields(layout, sent, num_bytes)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (*shape, num_bytes)
    for before, after in zip(sent, unpack_fields(layout, buffer), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_bit_stream_is_numpys_little_endian_one(bits):
    sent = values_of(codes(13, bits), (4,), 0)
    places = (sent.numpy()[..., None] >> np.arange(bits)) & 1
    expected = np.packbits(places.reshape(4, -1).astype(np.uint8), axis=-1, bitorder="little")
    got = pack_fields([codes(13, bits)], (sent,), (13 * bits + 7) // 8)
    np.testing.assert_array_equal(got.numpy(), expected)


def test_bits_that_spell_nan_survive():
    payload = torch.tensor([[0x7FC1, 0x7F81, -0x7F]], dtype=torch.int16).view(torch.bfloat16)
    (back,) = unpack_fields(
        [floats(3, torch.bfloat16)], pack_fields([floats(3, torch.bfloat16)], (payload,), 6)
    )
    assert torch.equal(back.view(torch.int16), payload.view(torch.int16))


def test_a_field_that_is_not_what_the_layout_says_is_refused():
    layout = [codes(3, 4)]
    with pytest.raises(ValueError, match="1 fields got 2"):
        pack_fields(layout, (torch.zeros(1, 3, dtype=torch.int32),) * 2, 2)
    with pytest.raises(ValueError, match="3 values"):
        pack_fields(layout, (torch.zeros(1, 4, dtype=torch.int32),), 2)
    with pytest.raises(ValueError, match="float32"):
        pack_fields(layout, (torch.zeros(1, 3),), 2)
    with pytest.raises(ValueError, match=r"1\.\.16"):
        codes(1, 17)
