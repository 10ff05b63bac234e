"""Weight movement: identities first, then numpy and scipy as oracles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import svdvals

from thinwire.instruments import movement as instrument
from thinwire.instruments.movement import (
    BF16_LINE,
    Moved,
    Place,
    by_block,
    center_of_mass,
    center_shifts,
    moved,
    movement,
    movement_series,
    place,
    spectral_norm,
    table,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_the_grid():
    """Every positive normal bf16 number below 2^126, so that no test of it overflows."""
    every = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16)
    return every[(every >= 2.0**-126) & (every < 2.0**126)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_change_reads_exactly_zero_and_cosine_one(dtype):
    weights = normal(7, 5).to(dtype)
    same = moved(weights, weights.clone())
    assert (same.relative_change, same.cosine, same.changed_bf16_share, same.spectral_norm) == (0, 1, 0, 0)


def test_a_change_of_rank_one_has_its_frobenius_norm_as_its_spectral_norm():
    """|s u v^T|_2 = |s u v^T|_F = s; float64 inputs, 1e-12 for the eigenvalue and the subtraction."""
    u, v = normal(40, seed=1).double(), normal(17, seed=2).double()
    base = normal(40, 17).double()
    sums = moved(base, base + 0.3 * torch.outer(u / u.norm(), v / v.norm()))
    assert sums.spectral_norm == pytest.approx(0.3, rel=1e-12)
    assert math.sqrt(sums.change_square) == pytest.approx(0.3, rel=1e-12)


def test_scaling_every_weight_by_the_line_changes_no_bf16_value():
    """Exhaustive: every bf16 number times 1 +- 2^-9 rounds back to itself (float64 products are exact)."""
    weights = on_the_grid().double()
    for sign in (1, -1):
        sums = moved(weights, weights * (1 + sign * BF16_LINE))
        assert sums.num_changed_bf16 == 0
        assert sums.relative_change == BF16_LINE  # a power of two times each weight, exactly


def test_the_line_is_the_largest_such_share_and_twice_it_changes_every_value():
    """Just below a power of two 2^-9 (1 + 2^-6) is enough; above 2^-8 (1 + 2^-6) nothing stays."""
    weights = on_the_grid().double()
    above = moved(weights, weights * (1 + BF16_LINE * (1 + 2**-6)))
    assert 0 < above.num_changed_bf16 < above.num_weights
    assert moved(weights, weights * (1 + 2 * BF16_LINE * (1 + 2**-6))).changed_bf16_share == 1.0


def test_masters_off_the_grid_may_change_on_less_than_the_line():
    middle = torch.tensor([1.0 + 2**-8 - 2**-20])
    assert moved(middle, middle + 2**-19).changed_bf16_share == 1.0


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000))
def test_every_reading_equals_numpy_and_scipy(rows, columns, seed):
    """float64 throughout; 1e-10 covers the sums and, for the spectral norm, squaring and LAPACK."""
    base = normal(rows, columns, seed=seed)
    current = base + 1e-3 * normal(rows, columns, seed=seed + 1)
    sums = moved(base, current)
    a, b = base.double().numpy(), current.double().numpy()
    assert sums.relative_change == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-10)
    cosine = np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)
    assert sums.cosine == pytest.approx(cosine, abs=1e-12)
    assert sums.spectral_norm == pytest.approx(svdvals(b - a)[0], rel=1e-10)
    assert sums.changed_bf16_share == np.mean((base.bfloat16() != current.bfloat16()).numpy())


def test_chunks_change_no_reading(monkeypatch):
    base, current = normal(37, 23), normal(37, 23, seed=1)
    whole = moved(base, current)
    monkeypatch.setattr(instrument, "CHUNK_WEIGHTS", 50)
    parts = moved(base, current)
    assert parts.num_weights == whole.num_weights
    assert parts.num_changed_bf16 == whole.num_changed_bf16
    for name in ("base_square", "current_square", "product", "change_square", "spectral_norm"):
        # 851 float64 additions in another order
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)


@given(st.floats(1e-3, 1e3), st.integers(0, 100))
def test_the_relative_change_and_the_cosine_know_no_unit(scale, seed):
    base, current = normal(6, 4, seed=seed).double(), normal(6, 4, seed=seed + 1).double()
    plain, scaled = moved(base, current), moved(base * scale, current * scale)
    assert scaled.relative_change == pytest.approx(plain.relative_change, rel=1e-12)
    assert scaled.cosine == pytest.approx(plain.cosine, abs=1e-12)


@given(st.integers(0, 500))
def test_the_spectral_norm_is_at_most_the_frobenius_norm_and_at_least_its_share(seed):
    """|A|_F / sqrt(rank) <= |A|_2 <= |A|_F, rank at most 5."""
    sums = moved(normal(9, 5, seed=seed), normal(9, 5, seed=seed + 1))
    frobenius = math.sqrt(sums.change_square)
    assert frobenius / math.sqrt(5) * (1 - 1e-12) <= sums.spectral_norm <= frobenius * (1 + 1e-12)


def test_vectors_and_stacks_of_matrices_have_a_spectral_norm_too():
    vector, stack = normal(12), normal(3, 5, 4)
    assert spectral_norm(torch.zeros(12), vector) == pytest.approx(float(vector.double().norm()), rel=1e-12)
    largest = max(svdvals(matrix.double().numpy())[0] for matrix in stack)
    assert spectral_norm(torch.zeros(3, 5, 4), stack) == pytest.approx(largest, rel=1e-12)


def test_what_cannot_be_told_is_none_and_what_is_not_finite_stays_visible():
    zero, one = torch.zeros(3, 2), torch.ones(3, 2)
    assert moved(zero, one).relative_change is None
    assert moved(zero, one).cosine is None
    assert moved(zero, zero).relative_change == 0.0
    assert moved(torch.zeros(0, 4), torch.zeros(0, 4)).changed_bf16_share == 0.0
    broken = moved(one, one * math.nan)
    assert math.isnan(broken.change_square)
    assert math.isnan(broken.spectral_norm)
    with pytest.raises(ValueError, match=r"shapes must agree, got \(3, 2\) and \(2, 3\)"):
        moved(zero, zero.T)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.layers.3.self_attn.q_proj.weight", Place(3, "q")),
        ("model.layers.3.self_attn.q_proj.bias", Place(3, "q.bias")),
        ("model.layers.12.mlp.down_proj.weight", Place(12, "down")),
        ("model.layers.0.input_layernorm.weight", Place(0, "norm")),
        ("model.layers.0.self_attn.k_norm.weight", Place(0, "norm")),
        ("model.norm.weight", Place(None, "norm")),
        ("model.embed_tokens.weight", Place(None, "embedding")),
        ("lm_head.weight", Place(None, "head")),
        ("model.layers.1.mlp.gate.weight", Place(1, "mlp.gate")),
        ("model.layers.1.mlp.experts.gate_up_proj", Place(1, "mlp.experts.gate_up_proj")),
        ("transformer.h.5.attn.c_attn.weight", Place(5, "attn.c_attn")),
        ("anything", Place(None, "anything")),
    ],
)
def test_block_and_kind_come_from_the_name(name, where):
    assert place(name) == where


def blocks_of(*changes):
    """A model of one q matrix a block, whose block l moved by changes[l] in one weight."""
    base = torch.ones(4, 4)
    for block, change in enumerate(changes):
        current = base.clone()
        current[1, 2] += change
        yield f"model.layers.{block}.self_attn.q_proj.weight", base, current
    yield "model.embed_tokens.weight", base, base + 5.0


def test_the_centre_of_mass_of_one_moved_block_is_its_index():
    for moving in range(4):
        found = movement(blocks_of(*(0.5 * (block == moving) for block in range(4))))
        assert center_of_mass(by_block(found)) == float(moving)


def test_the_centre_of_mass_weighs_by_squared_change_and_leaves_the_embedding_out():
    assert center_of_mass(by_block(movement(blocks_of(1, 1, 1, 1)))) == 1.5
    assert center_of_mass(by_block(movement(blocks_of(1, 0, 0, 2)))) == 3 * 4 / 5
    assert center_of_mass(by_block(movement(blocks_of(0, 0)))) is None


def test_the_centre_moves_by_the_difference_of_readings_that_exist():
    assert center_shifts([None, 1.0, 1.5, None, 2.0]) == [None, None, 0.5, None, None]
    assert center_shifts([]) == []


def test_the_table_adds_up_and_its_series_are_its_totals():
    readings = table(movement(blocks_of(1, 0, 2)))
    assert [row["block"] for row in readings["blocks"]] == [0, 1, 2]
    assert readings["blocks"][2]["kinds"]["q"]["change_norm"] == readings["blocks"][2]["change_norm"] == 2.0
    assert readings["kinds"]["q"]["change_norm"] == pytest.approx(math.sqrt(5), rel=1e-15)
    assert readings["kinds"]["q"]["center_of_mass"] == readings["center_of_mass"] == 2 * 4 / 5
    assert readings["outside"]["embedding"]["change_norm"] == 20.0
    squares = 1 + 4 + 400
    assert readings["total"]["change_norm"] == pytest.approx(math.sqrt(squares), rel=1e-15)
    assert readings["total"]["num_weights"] == 64
    series = movement_series(readings)
    assert series["movement/relative_change"] == pytest.approx(math.sqrt(squares / 64), rel=1e-15)
    assert series["movement/spectral_norm_max"] == pytest.approx(20.0, rel=1e-12)
    assert "movement/center_of_mass" not in movement_series(table(movement(blocks_of(0, 0))))


def test_sums_of_groups_are_sums_and_the_spectral_norm_is_the_largest():
    a, b = moved(normal(3, 4), normal(3, 4, seed=1)), moved(normal(5, 2), normal(5, 2, seed=2))
    assert (a + b).num_weights == 22
    assert (a + b).change_square == a.change_square + b.change_square
    assert (a + b).spectral_norm == max(a.spectral_norm, b.spectral_norm)
    assert Moved() + a == a
