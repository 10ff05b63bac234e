"""Logs of every kind give the same readings under our names; odd ones are told apart in one line."""

import csv
import json

import numpy as np
import pytest

from tests.reports.synthetic import write_comparison, write_run
from thinwire.cli import main
from thinwire.core.errors import UserError
from thinwire.reports.load import load_run
from thinwire.reports.logs import read_logs

STEPS = 120


@pytest.fixture(scope="module")
def series():
    rng = np.random.default_rng(1)
    t = np.arange(1, STEPS + 1)
    return {
        "critic/score/mean": 0.3 + 0.3 * t / STEPS + 0.02 * rng.standard_normal(STEPS),
        "rollout_corr/kl": 1.0 + 0.01 * rng.standard_normal(STEPS),
        "actor/grad_norm": 0.5 + 0.02 * rng.standard_normal(STEPS),
    }


def rows(series):
    return [{key: float(values[i]) for key, values in series.items()} for i in range(STEPS)]


def verl_console(path, series):
    lines = ["(TaskRunner pid=7) \x1b[36mstarting\x1b[0m\n", "not a step line\n"]
    for i, row in enumerate(rows(series), start=1):
        items = " - ".join(f"{key}:{value!r}" for key, value in row.items())
        lines.append(f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{i} - {items}\n")
    path.write_text("".join(lines))


def wandb_csv(path, series):
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["Step", *series])
        for i, row in enumerate(rows(series), start=1):
            table.writerow([i, *row.values()])


def wandb_jsonl(path, series):
    """History rows hold null where another call logged the key."""
    lines = []
    for i, row in enumerate(rows(series), start=1):
        empty = dict.fromkeys(row)
        first, *others = row
        lines.append({"_step": 2 * i, "training/global_step": i, **empty, first: row[first]})
        lines.append({"_step": 2 * i + 1, "training/global_step": i, **empty, **{k: row[k] for k in others}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


WRITERS = {"log.txt": verl_console, "wandb.csv": wandb_csv, "history.jsonl": wandb_jsonl}


@pytest.mark.parametrize("name", WRITERS)
def test_a_log_gives_the_readings_that_were_written(tmp_path, series, name):
    WRITERS[name](tmp_path / name, series)
    (run,) = read_logs(tmp_path / name)
    for key, values in series.items():
        assert run.get(key).steps.tolist() == list(range(1, STEPS + 1))
        np.testing.assert_array_equal(run.get(key).values, values)


def test_a_trainer_state_of_trl_is_read_under_our_names(tmp_path):
    history = [
        {"step": i, "reward": 0.1 * i, "kl": 0.01, "grad_norm": 1.0, "epoch": 0.1} for i in range(1, 9)
    ]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"epoch": 1.0, "global_step": 8, "log_history": history}))
    (run,) = read_logs(path)
    assert run.get("critic/score/mean").values.tolist() == [0.1 * i for i in range(1, 9)]
    assert run.get("actor/kl_loss").values.tolist() == [0.01] * 8
    assert any("reward is read as critic/score/mean" in note for note in run.notes)


def test_a_run_directory_reads_as_the_report_reads_it(tmp_path):
    folder = write_run(tmp_path / "run", "exact-k", 1, 60)
    (run,) = read_logs(folder)
    np.testing.assert_array_equal(
        run.get("rollout_corr/kl").values, load_run(folder).get("rollout_corr/kl").values
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [("empty.log", b""), ("junk.bin", bytes(range(256)) * 40), ("prose.txt", b"nothing of the kind\n" * 9)],
)
def test_what_is_no_log_is_refused_in_one_line_that_says_what_was_looked_for(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_logs(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_logs_and_a_missing_file_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError):
            read_logs(path)


def test_repeated_falling_and_broken_steps_keep_the_last_reading(tmp_path):
    lines = [{"step": s, "rollout_corr/kl": v} for s, v in ((1, 1.0), (2, 2.0), (2, 3.0), (1, 4.0))]
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rollout_c\n')
    (run,) = read_logs(path)
    gap = run.get("rollout_corr/kl")
    assert gap.steps.tolist() == [1, 2]
    assert gap.values.tolist() == [4.0, 3.0]


def test_the_command_gives_one_object_with_the_verdict_and_its_rule(tmp_path, series, capsys):
    verl_console(tmp_path / "log.txt", series)
    assert main(["analyze", str(tmp_path / "log.txt"), "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    (run,) = found["runs"]
    assert run["verdict"]["word"] == "STATIONARY"
    assert "COLLAPSED" in text


def test_seeds_are_pooled_and_two_runs_compared(tmp_path, capsys):
    root = write_comparison(tmp_path / "all", num_steps=100)
    assert main(["analyze", str(root / "exact-k"), str(root / "dense"), "--series", "rollout_corr/kl"]) == 0
    assert "exact-k" in capsys.readouterr().out
    pair = [str(root / arm / "seed-1") for arm in ("dense", "exact-k")]
    assert main(["analyze", *pair, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2


@pytest.mark.parametrize(
    "wrong",
    [["--window", "9:3"], ["--window", "x"], ["--slope", "-1"], ["--series", "no/such"], ["--bound", "nan"]],
)
def test_wrong_usage_is_one_line(tmp_path, series, capsys, wrong):
    verl_console(tmp_path / "log.txt", series)
    assert main(["analyze", str(tmp_path / "log.txt"), *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
