"""Weight movement of live runs: no bit changes, lines equal checkpoints, a resume repeats none."""

import json

import pytest
import torch

from tests.train.runs import recipe, run
from tests.train.test_step import start
from thinwire.core.errors import UserError
from thinwire.engines.local import LocalEngine
from thinwire.instruments.movement import moved
from thinwire.train import checkpoint, loop
from thinwire.train.step import run_step

ON = ("--probe.every=2", "--probe.held_prompts=0", "--probe.movement=true")
SERIES = {
    "movement/relative_change",
    "movement/cosine",
    "movement/changed_bf16_share",
    "movement/spectral_norm_max",
    "movement/center_of_mass",
}


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_clocks(out):
    dropped = ("timing_s", "memory", "movement/")
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines(out)]


@pytest.mark.parametrize(
    ("codec", "extra"),
    [("subspace", ()), ("exact-k", ("--model.dtype=bfloat16", "--optimizer.learning_rate=1e-3"))],
)
def test_a_run_is_the_same_bit_for_bit_with_movement_on_and_off(tmp_path, codec, extra):
    run(tmp_path / "on", "--steps=4", *ON, *extra, codec=codec)
    run(tmp_path / "off", "--steps=4", *ON[:2], *extra, codec=codec)
    assert without_clocks(tmp_path / "on" / "metrics.jsonl") == without_clocks(tmp_path / "off/metrics.jsonl")
    assert lines(tmp_path / "on" / "rollouts.jsonl") == lines(tmp_path / "off" / "rollouts.jsonl")
    on, off = (checkpoint.load(tmp_path / name / "checkpoints" / "step-4").engine for name in ("on", "off"))
    assert on.keys() == off.keys()
    assert all(torch.equal(tensor, off[name]) for name, tensor in on.items())
    assert not (tmp_path / "off" / "movement.jsonl").exists()


def test_lines_and_series_stand_at_the_probe_steps_only(tmp_path):
    run(tmp_path, "--steps=4", *ON)
    assert [line["step"] for line in lines(tmp_path / "movement.jsonl")] == [1, 3, 4]
    for row in lines(tmp_path / "metrics.jsonl"):
        present = {key for key in row if key.startswith("movement/")}
        assert present == (SERIES if row["step"] in (1, 3, 4) else set())
        assert ("timing_s/movement" in row) == (row["step"] in (1, 3, 4))


def test_the_last_line_is_the_movement_of_the_last_checkpoint(tmp_path):
    """The same sums over the same tensors in another order of matrices: 1e-12 of float64."""
    run(tmp_path, "--steps=3", *ON)
    parts, *_ = start(recipe())
    start_of, end = parts.engine.gather_weights("reference"), checkpoint.load(tmp_path / "checkpoints/step-3")
    sums = [moved(weight, end.engine[f"weight.{name}"]) for name, weight in start_of.items()]
    expected = sum(s.change_square for s in sums) / sum(s.base_square for s in sums)
    (*_, last) = lines(tmp_path / "movement.jsonl")
    assert last["total"]["relative_change"] == pytest.approx(expected**0.5, rel=1e-12)
    assert last["total"]["num_weights"] == sum(weight.numel() for weight in start_of.values())
    assert (
        lines(tmp_path / "metrics.jsonl")[-1]["movement/relative_change"] == last["total"]["relative_change"]
    )
    assert len(last["blocks"]) == 8
    assert set(last["blocks"][0]["kinds"]) == {"q", "k", "v", "o", "gate", "up", "down", "norm"}
    assert set(last["outside"]) == {"embedding", "head", "norm"}


def test_in_bf16_the_masters_move_and_the_share_is_that_of_the_computed_weights(tmp_path):
    """At 1e-5 most bf16 weights stay; every master with a gradient moves."""
    parts, settings, anchor = start(
        recipe("--model.dtype=bfloat16", "--optimizer.learning_rate=1e-5", codec="identity")
    )
    run_step(parts, 1, settings, anchor)
    engine = parts.engine
    base, now = engine.gather_weights("reference"), engine.gather_weights()
    masters = {name.removeprefix("weight."): tensor for name, tensor in engine.state().items()}
    sums = [moved(base[name], masters[name]) for name in base]
    assert sum(s.num_changed_bf16 for s in sums) == sum(int((base[n] != now[n]).sum()) for n in base)
    changed = sum(int((masters[name] != base[name].float()).sum()) for name in base)
    assert 0 < sum(s.num_changed_bf16 for s in sums) < 0.5 * changed


def test_the_reference_weights_are_the_start_and_stay_so(tmp_path):
    parts, settings, anchor = start(recipe("--optimizer.learning_rate=1e-3"))
    before = {name: tensor.clone() for name, tensor in parts.engine.gather_weights().items()}
    run_step(parts, 1, settings, anchor)
    reference, now = parts.engine.gather_weights("reference"), parts.engine.gather_weights()
    assert all(torch.equal(reference[name], tensor) for name, tensor in before.items())
    assert any(not torch.equal(now[name], tensor) for name, tensor in before.items())


def test_a_rate_of_zero_reads_no_movement_and_no_centre(tmp_path):
    run(tmp_path, *ON, "--optimizer.learning_rate=0")
    for line in lines(tmp_path / "movement.jsonl"):
        assert (line["total"]["relative_change"], line["total"]["cosine"]) == (0.0, 1.0)
        assert line["center_of_mass"] is None
    assert "movement/center_of_mass" not in lines(tmp_path / "metrics.jsonl")[-1]


def test_a_resumed_run_repeats_no_line_and_equals_an_uninterrupted_one(tmp_path):
    """The checkpoint stands at step 2; the lines of steps 3 and 4 were written before the run went on."""
    run(tmp_path / "whole", "--steps=4", "--checkpoint.every=2", *ON)
    run(tmp_path / "cut", "--steps=4", "--checkpoint.every=2", *ON)
    newest = tmp_path / "cut" / "checkpoints" / "step-4"
    newest.rename(tmp_path / "gone")
    with (tmp_path / "cut" / "movement.jsonl").open("a") as file:
        file.write('{"step": 5, "total": {"rel')
    run(tmp_path / "cut", "--steps=4", "--checkpoint.every=2", *ON, resume=True)
    assert lines(tmp_path / "cut" / "movement.jsonl") == lines(tmp_path / "whole" / "movement.jsonl")


def test_a_line_that_the_disk_refused_is_written_on_resume(tmp_path, monkeypatch):
    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    def last_step_fails(parts, directory, step):
        return real(parts, directory, step) if step < 3 else full(None)

    real = loop.record_movement
    run(tmp_path / "whole", *ON)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "record_movement", last_step_fails)
        with pytest.raises(Exception, match="No space left"):
            run(tmp_path / "cut", *ON)
    run(tmp_path / "cut", *ON, resume=True)
    assert lines(tmp_path / "cut" / "movement.jsonl") == lines(tmp_path / "whole" / "movement.jsonl")
    last = [lines(tmp_path / name / "metrics.jsonl")[-1] for name in ("cut", "whole")]
    assert last[0]["movement/relative_change"] == last[1]["movement/relative_change"]
    assert [row["step"] for row in lines(tmp_path / "cut" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_movement_without_probe_steps_is_refused():
    with pytest.raises(UserError, match=r"probe\.movement = true has no effect with probe\.every = 0"):
        recipe("--probe.movement=true")


def test_the_master_prefix_is_what_the_engine_writes():
    parts, *_ = start(recipe())
    assert isinstance(parts.engine, LocalEngine)
    names = {name.removeprefix("weight.") for name in parts.engine.state() if name.startswith("weight.")}
    assert names == set(dict(parts.engine.model.named_parameters()))
