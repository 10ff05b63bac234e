"""Delta coding: what is remembered, what it costs, when it converges and how often text comes again.

Letters: B rows, T positions, N tokens, D hidden size.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import (
    CodecState,
    DeltaMemory,
    ExactK,
    Identity,
    RoundToNearest,
    StochasticRounding,
    delta_cross,
    delta_wire_bits,
    prefix_keys,
)
from thinwire.core.keys import TokenKeys

EMPTY = CodecState(0, {})


def visits(codec, hidden_ND, num, first_visit="dense", dtype=torch.float32):
    """||h~ - h|| / ||h|| after each of `num` visits of the same tokens, whose hidden states stand still."""
    memory, key_N, errors = (
        DeltaMemory.empty(hidden_ND.shape[-1], dtype),
        torch.arange(len(hidden_ND)) + 5,
        [],
    )
    for step in range(1, num + 1):
        keys = TokenKeys(3, step, key_N, torch.zeros_like(key_N))
        draw = codec.draw(keys, 0)
        decoded_ND, memory = delta_cross(codec, memory, hidden_ND, key_N, draw, EMPTY, first_visit)
        errors.append(float((decoded_ND - hidden_ND).norm() / hidden_ND.norm()))
    return errors


@pytest.mark.parametrize("kind", [RoundToNearest, StochasticRounding])
def test_the_error_of_a_standing_hidden_state_falls_at_every_visit_under_a_rounding(kind):
    """4 bits: a step is 2 / 15 of the largest change; nearest leaves 1 / 15 of it at most, chance 2 / 15."""
    errors = visits(kind(bits=4, keep=64).at_width(64), torch.randn(10, 64), 5, first_visit="codec")
    for before, after in itertools.pairwise(errors):
        assert after < 0.35 * before
    assert errors[-1] < 1e-3


def test_the_error_grows_at_every_visit_under_an_unbiased_mask():
    """E||C(x) - x||^2 = (D / K - 1) ||x||^2 = 15 ||x||^2: sqrt(15) a visit. The square of the second visit is
    made by the 1000 of 256,000 values that were kept both times: 3% of standard error."""
    errors = visits(ExactK(keep=4).at_width(64), torch.randn(4000, 64), 2, first_visit="codec")
    assert errors == pytest.approx([15**0.5, 15.0], rel=0.2)


def test_a_first_visit_is_exact_to_the_type_of_the_memory():
    hidden_ND = torch.randn(6, 16)
    codec = RoundToNearest(bits=1, keep=16).at_width(16)
    draw = codec.draw(TokenKeys(1, 1, torch.arange(6), torch.arange(6)), 0)
    decoded_ND, memory = delta_cross(codec, DeltaMemory.empty(16), hidden_ND, torch.arange(6), draw, EMPTY)
    assert torch.equal(decoded_ND, hidden_ND.bfloat16().float())
    assert torch.equal(memory.recall(torch.arange(6)), decoded_ND)


def test_both_ends_of_a_boundary_decode_the_same_from_what_is_sent_and_remembered():
    """The receiver has no hidden state: its memory and the payload give the sender's h~ bit for bit."""
    codec = StochasticRounding(bits=3, keep=20).at_width(20)
    key_N = torch.tensor([4, 9, 9, 1])
    draw = codec.draw(TokenKeys(1, 1, key_N, torch.arange(4)), 0)
    hidden_ND = torch.randn(4, 20)
    _, memory = delta_cross(codec, DeltaMemory.empty(20), hidden_ND, key_N, draw, EMPTY, "codec")
    moved_ND = hidden_ND + 0.1 * torch.randn(4, 20)
    sent_ND, _ = delta_cross(codec, memory, moved_ND, key_N, draw, EMPTY, "codec")
    payload = codec.pack(codec.encode(moved_ND - memory.recall(key_N), draw, EMPTY), EMPTY, torch.float32)
    arrived = codec.decode(codec.unpack(payload, EMPTY, torch.float32), draw, EMPTY)
    received_ND = (memory.recall(key_N) + arrived).bfloat16().float()
    assert torch.equal(received_ND, sent_ND)


def test_the_memory_given_is_left_as_it_was_and_the_new_one_holds_the_last_of_equal_keys():
    memory = DeltaMemory.empty(2, torch.float32).remember(torch.tensor([5, 3]), torch.eye(2))
    later = memory.remember(torch.tensor([7, 3, 7]), torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
    assert memory.key_M.tolist() == [3, 5]
    assert later.key_M.tolist() == [3, 5, 7]
    assert later.hidden_MD.tolist() == [[2.0, 2.0], [1.0, 0.0], [3.0, 3.0]]
    assert later.recall(torch.tensor([[7, 4]])).tolist() == [[[3.0, 3.0], [0.0, 0.0]]]


def test_the_buffer_takes_a_key_and_d_values_for_every_prefix_at_each_end():
    memory = DeltaMemory.empty(1536).remember(torch.arange(1000), torch.zeros(1000, 1536).bfloat16())
    assert memory.num_bytes() == 1000 * (8 + 2 * 1536)


def test_wire_bits_count_new_prefixes_dense_as_aq_sgd_does():
    codec = RoundToNearest(bits=4, keep=64, block=64).at_width(64)
    coded = 8 * ((64 * 4 + 12 + 7) // 8)
    assert delta_wire_bits(codec, 3, 2, torch.float32) == 3 * coded + 2 * 16 * 64
    assert delta_wire_bits(codec, 3, 2, torch.float32, "codec") == 5 * coded
    assert Identity().at_width(64).wire_bits(torch.bfloat16) == 16 * 64


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=2, max_size=5),
)
def test_two_prefix_keys_are_equal_exactly_where_the_prefixes_are(rows):
    ids_BT = torch.tensor(rows)
    keys_BT = prefix_keys(ids_BT).tolist()
    places = [(b, t) for b in range(len(rows)) for t in range(6)]
    for (b, t), (c, u) in itertools.combinations(places, 2):
        assert (keys_BT[b][t] == keys_BT[c][u]) == (rows[b][: t + 1] == rows[c][: u + 1])


def test_prefix_keys_of_many_prefixes_are_distinct_and_their_bits_are_fair():
    """100,000 of them: a collision has a chance of 3e-10; each bit is set half of the time to 6 errors."""
    keys_B = prefix_keys(torch.arange(100_000)[:, None]).flatten()
    assert len(keys_B.unique()) == 100_000
    for place in range(64):
        assert abs(float(((keys_B >> place) & 1).double().mean()) - 0.5) < 6 * 0.5 / 100_000**0.5


def test_the_hit_rate_is_one_for_a_corpus_and_that_of_the_prompts_on_policy():
    """Responses drawn afresh from 50 tokens: only the prompt, 4 of 12 tokens, comes again (and, by luck, a
    first response token)."""
    generator = torch.Generator().manual_seed(0)
    prompt_BT = torch.randint(0, 50, (16, 4), generator=generator)
    memory, rates = DeltaMemory.empty(1), []
    for _ in range(3):
        response_BT = torch.randint(0, 50, (16, 8), generator=generator)
        key_N = prefix_keys(torch.cat((prompt_BT, response_BT), 1)).flatten()
        rates.append(memory.hit_rate(key_N))
        memory = memory.remember(key_N, torch.zeros(len(key_N), 1).bfloat16())
    assert rates[0] == 0.0
    assert 4 / 12 <= rates[1] <= rates[2] < 4 / 12 + 0.05
    assert memory.hit_rate(key_N) == 1.0
