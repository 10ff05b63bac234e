"""What every codec in CODECS may spend: bits on the wire, and memory.

Letters: N tokens, D hidden size.
"""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.codecs.helpers import compressing, every_codec, keys
from thinwire.codecs import ExactK, cross
from thinwire.core.errors import UserError


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
