"""Keys: known answers, independence of batching, a bijection, and uniform subsets.

Letters: N tokens.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from thinwire.core.keys import (
    Stream,
    TokenKeys,
    normals,
    permutation_prefix,
    philox4x32,
    scalar_keys,
    uniforms,
    words,
)


def token_keys(num: int, seed: int = 1, step: int = 1) -> TokenKeys:
    return TokenKeys(seed, step, torch.arange(num), torch.zeros(num, dtype=torch.int64))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_the_random123_paper(counter, key, expected):
    """The vectors published with Random123 for philox4x32, 10 rounds."""
    words_4 = philox4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(word.item() for word in words_4) == expected


@given(
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    positions=st.integers(1, 7),
    num=st.integers(1, 9),
    data=st.data(),
)
def test_a_word_depends_on_its_own_key_and_on_nothing_else(seed, step, rows, positions, num, data):
    """Batching, order, padding and the number of words asked for leave every word as it is."""
    sample = torch.arange(rows)[:, None]
    position = torch.arange(positions)[None]
    whole = words(TokenKeys(seed, step, sample, position), Stream.ACTIVATION_MASK, 3, num)
    row = data.draw(st.integers(0, rows - 1))
    at = data.draw(st.integers(0, positions - 1))
    alone = words(
        TokenKeys(seed, step, torch.tensor([row]), torch.tensor([at])), Stream.ACTIVATION_MASK, 3, num + 5
    )
    assert torch.equal(whole[row, at], alone[0, :num])
    flipped = TokenKeys(seed, step, sample.flip(0), position.flip(1))
    assert torch.equal(words(flipped, Stream.ACTIVATION_MASK, 3, num).flip(0, 1), whole)


def test_every_part_of_the_key_changes_the_words():
    base = {"seed": 1, "stream": Stream.ACTIVATION_MASK, "boundary": 2, "step": 3, "sample": 4, "position": 5}
    changes = [{"stream": Stream.SAMPLER}] + [{part: base[part] + 1} for part in base if part != "stream"]

    def drawn(parts):
        keys = TokenKeys(
            parts["seed"], parts["step"], torch.tensor([parts["sample"]]), torch.tensor([parts["position"]])
        )
        return tuple(words(keys, parts["stream"], parts["boundary"], 4)[0].tolist())

    draws = [drawn(base)] + [drawn(base | change) for change in changes]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize(
    ("field", "keys", "boundary"),
    [
        ("seed", scalar_keys(1 << 32, 0), 0),
        ("seed", scalar_keys(-1, 0), 0),
        ("step", scalar_keys(0, 1 << 32), 0),
        ("boundary", scalar_keys(0, 0), 1 << 16),
    ],
)
def test_a_key_out_of_range_is_refused(field, keys, boundary):
    with pytest.raises(ValueError, match=field):
        words(keys, Stream.SAMPLER, boundary, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 16, 128, 1536])
def test_the_whole_prefix_is_a_permutation(size):
    drawn = permutation_prefix(token_keys(40), Stream.ACTIVATION_MASK, 0, size, size)
    assert torch.equal(drawn.sort(dim=-1).values, torch.arange(size).expand(40, size))


@pytest.mark.parametrize(("size", "num"), [(128, 6), (1536, 77), (6, 2)])
def test_a_shorter_prefix_is_the_start_of_a_longer_one(size, num):
    longer = permutation_prefix(token_keys(10), Stream.ACTIVATION_MASK, 0, size, size)
    assert torch.equal(
        longer[:, :num], permutation_prefix(token_keys(10), Stream.ACTIVATION_MASK, 0, size, num)
    )


@pytest.mark.parametrize(("size", "num"), [(6, 2), (5, 3), (7, 1)])
def test_subsets_are_uniform_over_a_million_draws(size, num):
    """Pearson's chi-square over all C(size, num) subsets. The keys are fixed, so it passes or fails for
    good; for a true uniform law 1 in 10^4 choices of keys would fail."""
    num_draws = 1_000_000
    drawn = permutation_prefix(token_keys(num_draws, seed=7), Stream.ACTIVATION_MASK, 0, size, num)
    code = (1 << drawn).sum(-1)
    subsets = [sum(1 << channel for channel in chosen) for chosen in itertools.combinations(range(size), num)]
    counts = torch.bincount(code, minlength=1 << size)[subsets].double()
    assert counts.sum() == num_draws
    expected = num_draws / len(subsets)
    statistic = ((counts - expected).square() / expected).sum().item()
    assert statistic < chi2.ppf(1 - 1e-4, len(subsets) - 1)


def test_orders_are_uniform_over_all_permutations_of_four():
    """All 24 orders, 240,000 draws; fixed keys, one choice in 10^4 would fail under a true uniform law."""
    drawn = permutation_prefix(token_keys(240_000, seed=3), Stream.TASK, 1, 4, 4)
    code = (drawn * torch.tensor([64, 16, 4, 1])).sum(-1)
    counts = torch.bincount(code, minlength=256).double()
    counts = counts[counts > 0]
    assert len(counts) == math.factorial(4)
    statistic = ((counts - 10_000).square() / 10_000).sum().item()
    assert statistic < chi2.ppf(1 - 1e-4, 23)


def test_uniforms_and_normals_follow_their_laws():
    """Kolmogorov-Smirnov on 100,000 keyed numbers; one choice of keys in 10^4 would fail."""
    assert kstest(uniforms(token_keys(100_000), Stream.SAMPLER, 0, 1).flatten(), "uniform").pvalue > 1e-4
    assert kstest(normals(token_keys(100_000), Stream.BASIS, 0, 1).flatten(), "norm").pvalue > 1e-4


def test_a_prefix_longer_than_the_set_is_refused():
    with pytest.raises(ValueError, match="no prefix of 7"):
        permutation_prefix(token_keys(1), Stream.TASK, 0, 6, 7)
