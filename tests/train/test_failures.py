"""What ends a run early: one line that says what, where and how to go on, and nothing lost before it."""

import errno
import json
import os

import pytest
import torch

from tests.train.runs import run
from tests.train.test_loop import metrics
from thinwire.core.errors import RunFailure, UserError
from thinwire.engines.local import LocalEngine
from thinwire.sampling.hf import HFSampler
from thinwire.train import checkpoint, loop
from thinwire.train.failures import cleared_on_failure, is_out_of_memory


def same(one, other):
    """Metrics and last checkpoint are equal bit for bit."""
    assert metrics(one) == metrics(other)
    ends = [checkpoint.load(out / "checkpoints" / "step-3") for out in (one, other)]
    assert all(torch.equal(t, ends[1].engine[name]) for name, t in ends[0].engine.items())


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def exhausted():
    """More than any machine has: the CPU allocator's own error."""
    return torch.empty(1 << 60, dtype=torch.uint8)


def gpu_exhausted():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")


def python_exhausted():
    raise MemoryError


@pytest.mark.parametrize("reward", ["infinite_reward", "large_reward"])
@pytest.mark.parametrize("num_validation", [0, 16])
def test_a_score_that_is_not_finite_in_fp32_stops_the_run_and_names_problem_and_answer(
    tmp_path, reward, num_validation
):
    """Such scores used to make every group equal: no update, and a run that was done."""
    settings = [f"--task.reward=tests.train.runs:{reward}", f"--task.num_validation={num_validation}"]
    with pytest.raises(RunFailure) as caught:
        run(tmp_path / "r", *settings)
    series = "val/score" if num_validation else "critic/score/mean"
    for words in (f"{series} = inf", "of problem '", "answer '", "--resume"):
        assert words in str(caught.value)
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("exhaust", [exhausted, gpu_exhausted, python_exhausted])
@pytest.mark.parametrize("mini", [0, 2], ids=["one tick", "two ticks"])
def test_a_step_out_of_memory_leaves_the_last_whole_step_and_resumes_as_if_it_had_never_begun(
    tmp_path, monkeypatch, exhaust, mini
):
    """The last tick of step 2 runs out; with two ticks the first one has changed the weights before."""
    real, calls = LocalEngine.train_step, []
    settings = [f"--rl.mini_batch_prompts={mini}"]

    def fail(self, *arguments):
        calls.append(1)
        if len(calls) == (4 if mini else 2):
            exhaust()
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "train_step", fail)
        with pytest.raises(RunFailure, match="step 2: out of memory") as caught:
            run(tmp_path / "r", *settings)
    for words in ("rl.micro_batch_rows", "rl.logprob_chunk_tokens", "resume from step 1"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    run(tmp_path / "r", *settings, resume=True)
    run(tmp_path / "whole", *settings)
    same(tmp_path / "r", tmp_path / "whole")


def test_weights_that_an_update_has_touched_are_not_saved_as_the_last_whole_step(tmp_path, monkeypatch):
    """One tick a step, so without a copy: memory runs out after step 2's update; step 1 is taken up."""
    real, calls = LocalEngine.apply_update, []

    def fail(self, settings):
        outcome = real(self, settings)
        calls.append(1)
        if len(calls) == 2:
            exhausted()
        return outcome

    settings = ["--rl.mini_batch_prompts=0", "--checkpoint.every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "apply_update", fail)
        with pytest.raises(RunFailure, match="resume from step 1"):
            run(tmp_path / "r", *settings)
    run(tmp_path / "r", *settings, resume=True)
    run(tmp_path / "whole", *settings)
    same(tmp_path / "r", tmp_path / "whole")


def test_a_second_fault_in_saving_does_not_hide_the_first(tmp_path, monkeypatch):
    """Memory runs out in step 1, and the disk is full."""
    monkeypatch.setattr(LocalEngine, "train_step", lambda *_: exhausted())
    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(RunFailure, match=r"step 1: out of memory.*could not be saved.*No space left"):
        run(tmp_path / "r")


def test_a_bad_step_of_one_tick_leaves_no_trace_of_its_merge(tmp_path, monkeypatch):
    """The anchor's average takes in step 2's gradient before the update that is refused."""
    real, calls = LocalEngine.train_step, []
    settings = ["--rl.mini_batch_prompts=0", "--anchor.cadence=1", "--anchor.merge_alpha=0.7"]

    def spoil(self, *arguments):
        losses = real(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            self.model.lm_head.weight.grad[0, 0] = torch.nan
        return losses

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "train_step", spoil)
        with pytest.raises(RunFailure, match="step 2 refused: actor/grad_norm"):
            run(tmp_path / "r", *settings)
    run(tmp_path / "r", *settings, resume=True)
    run(tmp_path / "whole", *settings)
    same(tmp_path / "r", tmp_path / "whole")


@pytest.mark.parametrize("last", [False, True])
def test_a_validation_that_fails_keeps_its_step_and_is_made_up_for_on_resume(tmp_path, monkeypatch, last):
    """Validation after step 2 of 3, or after the last one, runs out of memory."""
    real, pushes = HFSampler.push, []
    settings = ["--validation.every=2"]

    def fail(self, version, weights):
        pushes.append(version)
        if len(pushes) == (6 if last else 4):  # first validation, steps 1 and 2, validation, 3, validation
            exhausted()
        real(self, version, weights)

    with monkeypatch.context() as patch:
        patch.setattr(HFSampler, "push", fail)
        step = 3 if last else 2
        with pytest.raises(RunFailure, match=rf"after step {step}: out of memory.*resume from step {step}"):
            run(tmp_path / "r", *settings)
    assert run(tmp_path / "r", *settings, resume=True)["status"] == "done"
    run(tmp_path / "whole", *settings)
    same(tmp_path / "r", tmp_path / "whole")


def test_other_faults_are_not_taken_for_a_lack_of_memory():
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(RunFailure("out of space"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_disk_that_is_full_at_the_end_is_one_line_and_the_run_resumes_to_its_summary(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_write_summary", full)
        with pytest.raises(RunFailure, match=r"No space left on device; resume from step 3 with"):
            run(tmp_path / "r")
    assert run(tmp_path / "r", resume=True)["status"] == "done"


@pytest.mark.parametrize("writer", ["write_json", "write_text"])
def test_a_disk_that_is_full_at_the_start_names_the_directory_and_leaves_it_usable(
    tmp_path, monkeypatch, writer
):
    out = tmp_path / "r"
    with monkeypatch.context() as patch:
        if writer == "write_json":
            patch.setattr(loop.RunDir, "write_json", full)
        else:
            patch.setattr("pathlib.Path.write_text", full)
        with pytest.raises((RunFailure, UserError), match=rf"--out {out} cannot be written: No space left"):
            run(out)
    assert os.listdir(out) == []
    assert run(out)["status"] == "done"


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt, UnicodeEncodeError("ascii", "\u00e9", 0, 1, "no"), UserError]
)
def test_a_directory_whose_first_files_could_not_be_written_is_free_again(tmp_path, fault):
    (tmp_path / "theirs").write_text("kept")

    def write():
        with cleared_on_failure(tmp_path):
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder" / "config.toml").write_text("half")
            raise fault

    with pytest.raises(fault if isinstance(fault, type) else type(fault)):
        write()
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]
