"""Runs in folders: resume bit for bit, checkpoints complete or absent, stops that lose nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.train.runs import recipe, run
from thinwire.core.errors import RunFailure, UserError
from thinwire.engines.local import LocalEngine
from thinwire.models.assets import embedded_model_path
from thinwire.train import checkpoint
from thinwire.train.config import dump_toml, load_recipe


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("timing_s", "memory"))} for line in lines]


@pytest.mark.parametrize(
    ("codec", "extra"),
    [
        ("exact-k", []),
        ("subspace", ["--anchor.cadence=2", "--anchor.delay=1", "--anchor.merge_alpha=0.7"]),
        ("identity", ["--model.dtype=bfloat16"]),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, codec, extra):
    run(tmp_path / "whole", "--steps=4", *extra, codec=codec)
    run(tmp_path / "parts", "--steps=2", *extra, codec=codec)
    run(tmp_path / "parts", "--steps=4", *extra, codec=codec, resume=True)
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    # the shorter run validated at its own last step; everything else is equal
    assert [line.pop("val/score", None) for line in whole][-1] == [
        line.pop("val/score", None) for line in parts
    ][-1]
    assert whole == parts
    ends = [checkpoint.load(tmp_path / name / "checkpoints" / "step-4") for name in ("whole", "parts")]
    assert ends[0].engine.keys() == ends[1].engine.keys()
    assert all(torch.equal(t, ends[1].engine[name]) for name, t in ends[0].engine.items())


def test_a_rate_of_zero_leaves_every_series_of_the_weights_flat(tmp_path):
    run(tmp_path / "r", "--optimizer.learning_rate=0", "--optimizer.weight_decay=0.5")
    lines = metrics(tmp_path / "r")
    assert all(line["actor/kl_loss"] == line["actor/ppo_kl"] == 0.0 for line in lines[1:])
    assert len({line["val/score"] for line in lines if "val/score" in line}) == 1


def test_a_run_directory_holds_what_a_reader_needs(tmp_path):
    out = tmp_path / "r"
    summary = run(out, "--checkpoint.models=true", "--logging.rollouts_per_step=3")
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.toml", "environment.json", "metrics.jsonl", "rollouts.jsonl", "summary.json"}
    assert load_recipe(out / "config.toml") == recipe(
        "--checkpoint.models=true", "--logging.rollouts_per_step=3"
    )
    assert summary["status"] == "done"
    assert json.loads((out / "summary.json").read_text()) == summary
    rows = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 9
    assert set(rows[0]) >= {"step", "sample", "prompt", "response", "answer", "score", "finished"}
    environment = json.loads((out / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith("2.")
    assert environment["seed"] == 1
    for name in ("final", "best"):
        assert AutoModelForCausalLM.from_pretrained(out / name).config.num_hidden_layers == 8


def test_the_final_model_holds_the_trained_weights(tmp_path):
    run(tmp_path / "r", "--checkpoint.models=true")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "final").state_dict()
    tree = checkpoint.load(tmp_path / "r" / "checkpoints" / "step-3")
    assert all(torch.equal(saved[name], tree.engine[f"weight.{name}"]) for name in saved)


def test_the_rollout_file_stops_growing_at_its_cap(tmp_path):
    run(tmp_path / "r", "--logging.rollouts_max_megabytes=0.0005", "--logging.rollouts_per_step=8")
    assert 0 < (tmp_path / "r" / "rollouts.jsonl").stat().st_size <= 500


def test_an_old_run_is_never_overwritten(tmp_path):
    run(tmp_path / "r", "--steps=1")
    with pytest.raises(UserError, match=r"already holds a run.*--resume"):
        run(tmp_path / "r", "--steps=1")


def test_resuming_nothing_says_so(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        run(tmp_path / "none", resume=True)


def test_a_run_stopped_before_its_first_checkpoint_resumes_from_the_start(tmp_path):
    out = tmp_path / "r"
    run(out, "--steps=2")
    for folder in (out / "checkpoints").iterdir():
        shutil.rmtree(folder)
    run(out, "--steps=2", resume=True)
    assert [line["step"] for line in metrics(out)] == [0, 1, 2]


@pytest.mark.parametrize("damage", ["cut", "json", "gone"])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    run(tmp_path / "r", "--steps=1")
    folder = tmp_path / "r" / "checkpoints" / "step-1"
    tensors = folder / "state.safetensors"
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:1000])
    elif damage == "json":
        (folder / "state.json").write_text("{")
    else:
        tensors.unlink()
    with pytest.raises(UserError, match="not a whole checkpoint"):
        run(tmp_path / "r", "--steps=2", resume=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("engine.weight.lm_head.weight", lambda t: t[:1]),
        ("engine.weight.lm_head.weight", None),
        ("engine.adamw.exp_avg.lm_head.weight", lambda t: t[:1]),
        ("codec.0.basis_DR", lambda t: t[:3]),
        ("codec.1.basis_DR", None),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_never_half_loaded(tmp_path, name, change):
    """Files of the right form with a tensor of another shape, or without one."""
    run(tmp_path / "r", "--steps=1", codec="subspace")
    file = tmp_path / "r" / "checkpoints" / "step-1" / "state.safetensors"
    tensors = load_file(file)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file)
    with pytest.raises(UserError, match="does not fit this run"):
        run(tmp_path / "r", "--steps=2", codec="subspace", resume=True)


def test_only_the_newest_checkpoints_are_kept_and_no_temporary_stays(tmp_path):
    run(tmp_path / "r", "--steps=4", "--checkpoint.every=1", "--checkpoint.keep=2")
    names = sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir())
    assert names == ["step-3", "step-4"]


def test_a_half_written_last_line_is_cut_before_a_run_resumes(tmp_path):
    out = tmp_path / "r"
    run(out, "--steps=2")
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "critic/sc')
    run(out, "--steps=3", resume=True)
    assert [line["step"] for line in metrics(out)] == [0, 1, 2, 3]


def test_a_step_that_overflows_stops_the_run_with_a_checkpoint_and_names_the_series(tmp_path):
    """A reward of 2e37 without standardisation makes a loss, or its gradient's norm, infinite in fp32."""
    out = tmp_path / "r"
    settings = ["--task.reward=tests.train.runs:huge_reward", "--rl.standardise=false", "--steps=9"]
    with pytest.raises(RunFailure, match=r"refused: actor/\w+ was the first series that is not") as caught:
        run(out, *settings)
    (step,) = checkpoint.list_steps(out / "checkpoints")
    assert f"step {step + 1} refused" in str(caught.value)
    assert f"resume from step {step}" in str(caught.value)
    assert metrics(out)[-1]["step"] == step
    assert json.loads((out / "summary.json").read_text())["status"] == "failed"
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert {"step": step + 1, "event": "non_finite"}.items() <= events[-1].items()
    assert f"{events[-1]['series']} was the first" in str(caught.value)


@pytest.mark.parametrize("codec", ["exact-k", "subspace"])
def test_a_step_refused_in_its_second_tick_is_undone_and_resumes_as_if_it_had_never_begun(
    tmp_path, monkeypatch, codec
):
    """The second tick of step 2 gets a NaN gradient; step 1 stands, the first tick of step 2 does not."""
    real, calls = LocalEngine.train_step, []

    def spoil(self, batches, view, loss):
        losses = real(self, batches, view, loss)
        calls.append(1)
        if len(calls) == 4:
            self.model.lm_head.weight.grad[0, 0] = torch.nan
        return losses

    extra = ["--anchor.cadence=1", "--anchor.merge_alpha=0.7"]
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "train_step", spoil)
        with pytest.raises(RunFailure, match="step 2 refused: actor/grad_norm"):
            run(tmp_path / "r", *extra, codec=codec)
    run(tmp_path / "r", *extra, codec=codec, resume=True)
    run(tmp_path / "whole", *extra, codec=codec)
    assert metrics(tmp_path / "r") == metrics(tmp_path / "whole")


def test_a_reward_that_fails_in_mid_run_leaves_the_last_whole_step(tmp_path):
    (tmp_path / "failing.py").write_text(
        "calls = []\ndef reward(problem, response):\n    calls.append(1)\n"
        "    if len(calls) > 60:\n        raise KeyError('oops')\n    return 0.0 if len(calls) % 2 else 1.0\n"
    )
    process = launch(tmp_path, "--steps=5", "--task.reward=failing:reward")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    assert "Traceback" not in errors
    assert "resume from step 2" in errors.strip().splitlines()[-1]


def test_a_run_is_not_resumed_from_other_weights(tmp_path):
    run(tmp_path / "a", "--steps=1", "--checkpoint.models=true")
    run(tmp_path / "b", "--steps=1", f"--model.path={tmp_path / 'a' / 'final'}")
    shutil.rmtree(tmp_path / "a" / "final")
    shutil.copytree(Path(str(embedded_model_path())), tmp_path / "a" / "final")
    with pytest.raises(UserError, match="other weights"):
        run(tmp_path / "b", "--steps=2", f"--model.path={tmp_path / 'a' / 'final'}", resume=True)


def test_greedy_sampling_is_refused_for_training(tmp_path):
    with pytest.raises(UserError, match=r"sampling.temperature must be > 0 to train"):
        run(tmp_path / "r", "--sampling.temperature=0")


def launch(tmp_path, *overrides, prelude=""):
    """The same run in a process of its own, as a user starts it."""
    (tmp_path / "recipe.toml").write_text(dump_toml(recipe(*overrides)))
    code = f"{prelude}\nfrom thinwire.cli import main\nraise SystemExit(main())"
    command = [sys.executable, "-c", code, "train", "recipe.toml", "--out", "out"]
    return subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_hangup_finish_the_step_and_leave_a_resumable_run(tmp_path, number):
    """The signal starts at its default: under nohup the tests inherit an ignored hangup, as a run would."""
    default = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)"
    process = launch(tmp_path, "--steps=200", prelude=default)
    file = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not file.exists() or len(file.read_text().splitlines()) < 3):
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    done = checkpoint.list_steps(tmp_path / "out" / "checkpoints")[-1]
    assert metrics(tmp_path / "out")[-1]["step"] == done
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    run(tmp_path / "out", f"--steps={done + 1}", resume=True)
    assert metrics(tmp_path / "out")[-1]["step"] == done + 1


@pytest.mark.parametrize("room_for_a_checkpoint", [True, False])
def test_a_full_disk_stops_the_run_in_one_line_and_it_resumes(tmp_path, room_for_a_checkpoint):
    """A limit on file size (RLIMIT_FSIZE) makes the real write of step 3's metrics fail with EFBIG; with
    room for a checkpoint the limit is lifted right after."""
    lift = "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))" if room_for_a_checkpoint else "pass"
    limit = (
        "import resource, signal, thinwire.train.loop as loop\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "real = loop.RunDir.append\n"
        "def append(self, file, value, max_bytes=None):\n"
        "    if value.get('step') == 3 and file.name == 'metrics.jsonl':\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 40, -1))\n"
        "        try:\n"
        "            return real(self, file, value, max_bytes)\n"
        f"        finally:\n            {lift}\n"
        "    real(self, file, value, max_bytes)\n"
        "loop.RunDir.append = append"
    )
    process = launch(tmp_path, "--steps=4", "--checkpoint.every=2", prelude=limit)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    step = 3 if room_for_a_checkpoint else 2
    assert f"resume from step {step}" in errors.strip().splitlines()[-1]
    run(tmp_path / "out", "--steps=4", resume=True)
    run(tmp_path / "whole", "--steps=4")
    pairs = zip(metrics(tmp_path / "out"), metrics(tmp_path / "whole"), strict=True)
    assert all(a["critic/score/mean"] == b["critic/score/mean"] for a, b in pairs if a["step"])
