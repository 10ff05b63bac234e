"""Trackers: what they get, what they are refused for, and how a resume and a comparison use them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.runs import BASE, recipe, run
from tests.train.test_compare import TINY
from tests.train.tracking import begun, got, raw_lines, tracked
from thinwire.cli import main
from thinwire.core.errors import RunFailure, UserError
from thinwire.engines.local import LocalEngine
from thinwire.reports.events import read_events
from thinwire.reports.logs import read_logs
from thinwire.train import loop, trackers
from thinwire.train.config import dump_toml, resolve
from thinwire.train.progress import NullObserver
from thinwire.train.rundir import recipe_sha256
from thinwire.train.trackers import TrackersConfig, refuse_missing


def assert_shows(folder, lines):
    """The events below `folder` are the numbers of `lines`, rounded to fp32, and nothing else."""
    series = read_events(folder).readings.series()
    names = {name for line in lines for name in line if name != "step"}
    assert set(series) == names
    for name in names:
        expected = [(line["step"], float(np.float32(line[name]))) for line in lines if name in line]
        assert list(zip(series[name].steps, series[name].values, strict=True)) == expected


def test_tensorboard_reads_back_every_number_of_the_metrics(tmp_path):
    out = tmp_path / "r"
    assert tracked(out, names="tensorboard") == []
    assert_shows(out / "tensorboard", raw_lines(out))
    (shown,) = read_logs(out / "tensorboard")
    assert "rollout_corr/kl" in shown.series
    (own,) = read_logs(out)  # a run directory is still read as one
    assert own.path == out
    assert main(["analyze", str(out / "tensorboard"), "--json"]) == 0
    assert not (out / "events.jsonl").exists()


def test_a_resumed_run_goes_on_in_the_same_tensorboard_folder_and_drops_no_step(tmp_path, monkeypatch):
    """Killed by an error in step 3, with the checkpoint of step 1 the newest: steps 2 and 3 come again."""
    out, settings = tmp_path / "r", ["--trackers.names=tensorboard", "--steps=4", "--checkpoint.every=1"]
    real, calls = LocalEngine.train_step, []

    def fail(self, *arguments):
        calls.append(1)
        if len(calls) > 4:  # two ticks a step
            raise ZeroDivisionError
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "train_step", fail)
        with pytest.raises(ZeroDivisionError):
            run(out, *settings)
    newest = out / "checkpoints" / "step-2"
    newest.rename(out / "gone")
    assert run(out, *settings, resume=True)["status"] == "done"
    assert len(list((out / "tensorboard").iterdir())) == 2
    steps = read_events(out / "tensorboard").readings.series()["critic/score/mean"].steps
    assert list(steps) == [1, 2, 3, 4]
    names = [name for name in raw_lines(out)[-1] if name.startswith(("critic", "actor", "rollout_corr"))]
    last = read_events(out / "tensorboard").readings.series()
    assert all(last[name].values[-1] == np.float32(raw_lines(out)[-1][name]) for name in names)


def test_a_tracker_gets_the_config_every_line_and_the_status(tmp_path, fake):
    fake()
    out = tmp_path / "r"
    messages = tracked(out, "--trackers.project=mine", "--trackers.group=all")
    assert messages == ["wandb: https://tracker.invalid/run"]
    assert got(tmp_path, "row") == raw_lines(out)
    assert got(tmp_path, "exit_code") == [0]
    (start,) = got(tmp_path, "start")
    assert (start["project"], start["group"], start["name"]) == ("mine", "all", "run-seed-1")
    assert start["config"]["sampling"]["prompts"] == 4
    assert (start["dir"], start["mode"], start["resume"]) == (str(out), None, "allow")


def test_a_resumed_run_keeps_its_id_and_two_runs_have_two(tmp_path, fake, monkeypatch):
    fake()
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "train_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "r", "--trackers.names=wandb")
    assert got(tmp_path, "exit_code") == [1]
    tracked(tmp_path / "r", resume=True)
    tracked(tmp_path / "other")
    first, again, other = (start["id"] for start in got(tmp_path, "start"))
    assert first == again != other


def test_numbers_only_and_nan_is_one(tmp_path, fake):
    fake()
    sender, _ = begun(tmp_path)
    sender.log({"step": 3, "x": float("nan"), "y": float("inf"), "text": "a", "flag": True, "none": None})
    sender.close("interrupted")
    (row,) = got(tmp_path, "row")
    assert row.pop("x") != 0
    assert row == {"step": 3, "y": float("inf")}
    assert got(tmp_path, "exit_code") == [1]


def test_tensorboard_shows_nan_as_nan(tmp_path):
    sender, said = begun(tmp_path, names=["tensorboard"])
    sender.log({"step": 3, "x": float("nan"), "y": -float("inf"), "z": 1e300})
    sender.close("done")
    series = read_events(tmp_path / "r" / "tensorboard").readings.series()
    assert [str(series[name].values[0]) for name in "xyz"] == ["nan", "-inf", "inf"]
    assert said == []


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    real = trackers.find_spec
    monkeypatch.setattr(trackers, "find_spec", lambda module: None if module == name else real(module))
    file = tmp_path / "tiny.toml"
    file.write_text(TINY + f"\n[trackers]\nnames = ['{name}']\n")
    for command in (["train"], ["train", "--check"], ["compare", "--out", "out"]):
        assert main([*command, str(file)]) == 2
        line = capsys.readouterr().err
        for words in (f"trackers.names = ['{name}']", f"pip install 'thinwire[{name}]'"):
            assert words in line
        assert line.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.toml"}


def test_a_folder_called_wandb_is_no_package(tmp_path, monkeypatch):
    """wandb leaves one in the working directory, which may be on the path."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="wandb is not installed"):
        refuse_missing(TrackersConfig(names=("wandb",)))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("names=wandbb", "trackers.names.0 = 'wandbb' is not valid: Input should be 'tensorboard', 'wandb'"),
        ("names=[3]", "trackers.names.0 = 3 is not valid"),
        ("names=wandb,wandb", "trackers.names = ['wandb', 'wandb'] names one twice"),
        ("wandb_mode=of", "trackers.wandb_mode = 'of' is not valid"),
        ("projct=x", "unknown key trackers.projct = 'x'; did you mean 'project'?"),
        ("project=", "trackers.project = '' is not valid"),
        ("flush_seconds=-1", "trackers.flush_seconds = -1 is not valid"),
    ],
)
def test_a_wrong_table_is_one_line_that_names_the_field(setting, words):
    with pytest.raises(UserError) as caught:
        recipe(f"--trackers.{setting}")
    assert words in str(caught.value)


def test_names_on_the_command_line_are_a_list_with_or_without_brackets():
    for text in ("tensorboard,wandb", "tensorboard, wandb", '["tensorboard", "wandb"]'):
        assert recipe(f"--trackers.names={text}").trackers.names == ("tensorboard", "wandb")
    assert recipe("--trackers.names=").trackers.names == ()


def test_the_recipes_hash_leaves_trackers_out_and_nothing_else():
    plain = dump_toml(recipe()).encode()
    with_trackers = dump_toml(recipe("--trackers.names=wandb,trackio", "--trackers.project=[x]")).encode()
    assert plain != with_trackers
    assert recipe_sha256(plain) == recipe_sha256(with_trackers)
    head, _, rest = plain.partition(b"\n[trackers]\n")
    without = head + rest[rest.index(b"\n[") :]  # as runs of before wrote it
    assert recipe_sha256(without) == recipe_sha256(plain)
    assert recipe_sha256(plain) != recipe_sha256(plain.replace(b"steps = 3", b"steps = 4"))
    assert recipe_sha256(head) == recipe_sha256(head + b"\n[trackers]\nnames = []\n")  # the last table
    arms = b"\n[arms.dense.trackers]\nnames = []\n"
    assert recipe_sha256(plain + arms) != recipe_sha256(plain)


def test_a_resume_may_turn_trackers_on_and_off(tmp_path, monkeypatch, capsys, fake):
    fake(log="raise RuntimeError('full')")
    out = tmp_path / "r"
    (tmp_path / "base.toml").write_text(dump_toml(recipe("--checkpoint.every=1")))
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "train_step", lambda *_: torch.empty(1 << 60))
        for settings in ([], ["--trackers.names=tensorboard"], ["--trackers.names=wandb"]):
            own = resolve(BASE, ["--codec.name=exact-k", "--checkpoint.every=1", *settings])
            with pytest.raises(RunFailure):
                loop.train(own, out, resume=out.exists(), observer=NullObserver())
    config = out / "config.toml"
    config.write_text(config.read_text().replace("names = []", "names = [\n    'wandb',\n]"))
    assert main(["train", "--resume", str(out), "--trackers.names", "tensorboard", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"
    series = read_events(out / "tensorboard").readings.series()
    assert list(series["critic/score/mean"].steps) == [1, 2, 3]
    assert config.read_text().count("tensorboard") == 0  # it says how the run began
    assert [row["step"] for row in raw_lines(out)] == [0, 1, 2, 3]


def test_every_run_of_a_comparison_is_a_tracked_run_of_one_group_and_its_failure_is_told(
    tmp_path, fake, capsys, monkeypatch
):
    """The dense arm's tracker fails; going on without trackers is no other recipe."""
    fake(
        start="Run.name = details['name']",
        log="if self.name == 'dense-seed-2': raise RuntimeError('quota')",
    )
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    command = ["compare", "tiny.toml", "--seeds", "2", "--jobs", "1", "--out", "both"]
    assert main([*command, "--trackers.names", "wandb"]) == 0
    starts = {start["name"]: start["group"] for start in got(tmp_path, "start")}
    assert starts == {"dense-seed-2": "both", "exact-k-seed-2": "both"}
    told = [line for line in capsys.readouterr().err.splitlines() if "tracker" in line]
    assert told == ["dense seed 2: tracker wandb failed, the run is unharmed: RuntimeError: quota"]
    assert main(command) == 0
