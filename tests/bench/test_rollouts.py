"""Splitting by prompt, keyed signs, and the file that keeps rollouts and statistics."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.bench.helpers import CPU, rows, saved
from thinwire.bench.rollouts import MICRO_TOKENS, micro_batches, num_tokens, split_by_prompt, to_rows
from thinwire.bench.store import load, refuse_target, save
from thinwire.core.errors import UserError
from thinwire.engines.batch import Rows
from thinwire.sampling.base import Rollouts


def repeated(prompts):
    num = len(prompts)
    return Rows(prompts, [[5, 6]] * num, [[-1.0, -1.0]] * num, list(range(num)), [1.0] * num)


def test_no_prompt_stands_on_both_sides_and_no_rollout_is_lost():
    prompts = [[i % 7, 1] for i in range(30)]
    both = split_by_prompt(repeated(prompts), 0.5)
    sides = [{tuple(p) for p in part.prompt_ids} for part in (both.statistics, both.scored)]
    assert not sides[0] & sides[1]
    assert len(sides[0]) == 4
    assert sorted([*both.statistics.sample, *both.scored.sample]) == list(range(30))


@pytest.mark.parametrize(("num", "share"), [(1, 0.5), (2, 0.5), (10, 0.01), (10, 0.95)])
def test_too_few_prompts_are_refused_with_both_counts(num, share):
    with pytest.raises(UserError, match=r"--rollouts \d+ gives .* raise --rollouts"):
        split_by_prompt(repeated([[i] for i in range(num)]), share)


def test_signs_are_keyed_by_seed_and_sample_and_even():
    """600 fair signs: within 4.5 standard deviations of 0 (false alarm below 1e-5)."""
    num = 600
    rollouts = Rollouts([[1]] * num, [[2]] * num, [[-1.0]] * num, [True] * num, list(range(num)), 0)
    signs = to_rows(rollouts, seed=3).advantages
    assert set(signs) == {1.0, -1.0}
    assert abs(sum(signs)) < 4.5 * num**0.5
    part = Rollouts([[1]], [[2]], [[-1.0]], [True], [77], 0)
    assert to_rows(part, seed=3).advantages == [signs[77]]
    assert to_rows(rollouts, seed=4).advantages != signs


def test_micro_batches_hold_all_rows_in_order_within_the_limit():
    many = rows(num=700)
    batches = micro_batches(many, CPU)
    assert torch.cat([batch.sample_B for batch in batches]).tolist() == list(range(700))
    assert all(batch.input_ids_BT.numel() <= MICRO_TOKENS for batch in batches)
    assert sum(int(batch.token_mask_BT.sum()) for batch in batches) == num_tokens(many)


def test_a_saved_file_gives_everything_back(tmp_path):
    path = tmp_path / "kept.safetensors"
    assert save(path, saved()) == path.stat().st_size
    again = load(path, saved().facts, CPU)
    assert again.sampled == saved().sampled
    assert again.facts == saved().facts
    for mine, kept in ((again.forward, saved().forward), (again.backward, saved().backward)):
        for one, other in zip(mine, kept, strict=True):
            assert one.num_tokens == other.num_tokens
            assert torch.equal(one.sum_D, other.sum_D)
            assert torch.equal(one.second_DD, other.second_DD)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("fingerprint", "sha256:1", "fingerprint sha256:0, this model has sha256:1"),
        ("width", 64, "width 32, this model has 64"),
        ("boundaries", [0, 1], r"boundaries \[1, 2\], this model has \[0, 1\]"),
    ],
)
def test_the_file_of_another_model_is_refused(tmp_path, name, value, words):
    path = tmp_path / "kept.safetensors"
    save(path, saved())
    with pytest.raises(UserError, match=words):
        load(path, {**saved().facts, name: value}, CPU)


def test_damaged_foreign_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "kept.safetensors"
    save(path, saved())
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load(path, saved().facts, CPU)
    with pytest.raises(UserError, match="not a whole safetensors file: No such file"):
        load(tmp_path / "none.safetensors", saved().facts, CPU)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="no file of thinwire codecs bench"):
        load(path, saved().facts, CPU)


def with_tensors(path, **changed):
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    save_file({**load_file(path), **changed}, path, metadata)


def test_statistics_that_are_not_finite_or_missing_are_refused(tmp_path):
    path = tmp_path / "kept.safetensors"
    save(path, saved())
    with_tensors(path, **{"moments.1.forward.second": torch.full((32, 32), float("inf"))})
    with pytest.raises(UserError, match="boundary/1/forward: the covariance"):
        load(path, saved().facts, CPU)
    path.unlink()
    save(path, saved())
    with_tensors(path, **{"scored.response_length": torch.tensor([1])})
    with pytest.raises(UserError, match=r"kept.safetensors is damaged"):
        load(path, saved().facts, CPU)


def test_a_file_is_saved_only_where_none_stands_and_a_folder_does(tmp_path):
    refuse_target(tmp_path / "new.safetensors")
    (tmp_path / "old.safetensors").touch()
    for path in (tmp_path / "old.safetensors", tmp_path / "new.bin", tmp_path / "none" / "new.safetensors"):
        with pytest.raises(UserError, match=r"--save must name a new \.safetensors file"):
            refuse_target(path)
