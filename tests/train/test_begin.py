"""Taking up a run: the newest whole checkpoint, the recipe and the format it was started with."""

import json

import pytest

from tests.train.runs import run
from thinwire.core.errors import UserError
from thinwire.train import checkpoint


def events(out):
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_run_ends_as_if_it_were_whole(tmp_path):
    settings = ("--steps=4", "--checkpoint.every=1", "--checkpoint.keep=2")
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    run(whole, *settings)
    run(hurt, *settings)
    tensors = hurt / "checkpoints" / "step-4" / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:1000])
    run(hurt, *settings, resume=True)
    ends = [checkpoint.load(out / "checkpoints" / "step-4").engine for out in (whole, hurt)]
    assert all(ends[1][name].equal(tensor) for name, tensor in ends[0].items())
    assert (hurt / "checkpoints" / "step-4.damaged").is_dir()
    assert checkpoint.list_steps(hurt / "checkpoints") == [3, 4]
    (resumed,) = [event for event in events(hurt) if event["event"] == "resumed"]
    assert (resumed["step"], resumed["damaged"]) == (3, ["step-4"])
    assert [row["step"] for row in map(json.loads, (hurt / "metrics.jsonl").open())] == [0, 1, 2, 3, 4]


def test_an_edited_recipe_is_refused_even_where_it_resolves_to_the_same(tmp_path):
    run(tmp_path / "r", "--steps=1")
    config = tmp_path / "r" / "config.toml"
    before = config.read_bytes()
    config.write_bytes(before + b"# a remark\n")
    with pytest.raises(UserError, match="edited after the run began"):
        run(tmp_path / "r", "--steps=1", resume=True)
    config.write_bytes(before)
    assert run(tmp_path / "r", "--steps=1", resume=True)["status"] == "done"


def test_a_checkpoint_of_another_format_is_refused_and_not_called_damaged(tmp_path):
    run(tmp_path / "r", "--steps=1")
    file = tmp_path / "r" / "checkpoints" / "step-1" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 7}))
    with pytest.raises(UserError, match="has format 7, this thinwire reads 2"):
        run(tmp_path / "r", "--steps=1", resume=True)
    assert file.exists()


@pytest.mark.parametrize("text", ["[]", "{}", '{"model": 3}', "[" * 20_000, "\xff"])
def test_an_environment_that_names_no_weights_is_one_line(tmp_path, text):
    run(tmp_path / "r", "--steps=1")
    (tmp_path / "r" / "environment.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="does not name the model's weights"):
        run(tmp_path / "r", "--steps=1", resume=True)


def test_lines_that_no_run_wrote_are_cut_on_resume(tmp_path):
    """A number too large for an integer, a step as text or true, bytes that are no text, a deep nest."""
    run(tmp_path / "r", "--steps=1")
    metrics = tmp_path / "r" / "metrics.jsonl"
    whole = metrics.read_bytes()
    odd = [b'{"step": 1e400}', b'{"step": "1"}', b'{"step": true}', b'{"step": 0, "x": \xff}', b"[" * 20_000]
    metrics.write_bytes(whole + b"\n".join(odd) + b"\n")
    assert run(tmp_path / "r", "--steps=1", resume=True)["status"] == "done"
    assert metrics.read_bytes() == whole
