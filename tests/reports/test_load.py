"""Reading run directories: complete, in progress, damaged."""

import json
import math
import subprocess
import sys

import pytest

from tests.reports.synthetic import write_comparison, write_run
from thinwire.core.errors import UserError
from thinwire.reports.load import load_rollouts, load_run, load_runs


def run_with_metrics(folder, text):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(text)
    return load_run(folder)


def test_a_comparison_is_read_with_dense_first_and_seeds_in_order(tmp_path):
    runs = load_runs(write_comparison(tmp_path, seeds=(2, 1), num_steps=20))
    assert [(run.arm, run.seed) for run in runs] == [
        (arm, seed) for arm in ("dense", "exact-k", "subspace-20", "subspace-10") for seed in (1, 2)
    ]
    assert [run.is_dense_control for run in runs] == [True] * 2 + [False] * 6
    assert runs[0].config["sampling"]["prompts"] == 32


def test_a_single_run_directory_is_one_run(tmp_path):
    (run,) = load_runs(write_run(tmp_path / "mine", "exact-k", 7, num_steps=20))
    assert (run.arm, run.seed, run.last_step, run.notes) == ("exact-k", 7, 20, ())


def test_values_are_those_of_the_file(tmp_path):
    run = run_with_metrics(
        tmp_path / "run", '{"step": 1, "a": 0.5}\n{"step": 3, "a": 2, "b": null, "c": true}\n'
    )
    assert run.get("a").steps.tolist() == [1, 3]
    assert run.get("a").values.tolist() == [0.5, 2.0]
    assert run.get("a").at(2) is None
    assert run.get("a").at(3) == 2.0
    assert len(run.get("b")) == len(run.get("c")) == len(run.get("never logged")) == 0


def test_a_half_written_last_line_is_left_out_and_named(tmp_path):
    run = run_with_metrics(tmp_path / "run", '{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert run.get("a").steps.tolist() == [1]
    assert any("line 2" in note for note in run.notes)


def test_a_resumed_run_keeps_the_last_reading_of_a_repeated_step(tmp_path):
    lines = ['{"step": 1, "a": 1}', '{"step": 2, "a": 2}', '{"step": 3, "a"', '{"step": 2, "a": 20}']
    run = run_with_metrics(tmp_path / "run", "\n".join(lines) + "\n")
    assert run.get("a").values.tolist() == [1.0, 20.0]


def test_nan_and_infinity_are_readings_as_tokens_and_as_strings(tmp_path):
    text = '{"step": 1, "a": NaN, "b": -Infinity}\n{"step": 2, "a": "nan", "b": "inf", "c": "information"}\n'
    run = run_with_metrics(tmp_path / "run", text)
    assert all(math.isnan(value) for value in run.get("a").values)
    assert run.get("b").values.tolist() == [-math.inf, math.inf]
    assert len(run.get("c")) == 0


def test_an_empty_file_is_a_run_without_steps(tmp_path):
    run = run_with_metrics(tmp_path / "run", "")
    assert run.last_step == 0
    assert "no step recorded yet" in run.notes


@pytest.mark.parametrize("text", ["[]", "3", "not json", "{}", '{"step": "x"}', "\x00\x00"])
def test_a_line_that_is_no_record_of_a_step_is_named(tmp_path, text):
    run = run_with_metrics(tmp_path / "run", text + "\n")
    assert run.series == {}
    assert any("line 1" in note for note in run.notes)


def test_a_folder_without_runs_is_a_user_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=f"found neither in .*{tmp_path.name}"):
        load_runs(tmp_path)
    with pytest.raises(UserError, match="must be an existing directory"):
        load_runs(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "text"), [("config.toml", "a = ["), ("summary.json", "{"), ("summary.json", "[]")]
)
def test_a_damaged_side_file_is_a_user_error_that_names_it(tmp_path, name, text):
    folder = write_run(tmp_path / "run", "dense", 1, num_steps=5)
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=name):
        load_run(folder)


def test_the_arm_and_the_seed_come_from_the_folder_where_no_summary_exists_yet(tmp_path):
    folder = write_run(tmp_path / "subspace-10" / "seed-3", "subspace-10", 3, num_steps=5)
    (folder / "summary.json").unlink()
    (folder / "config.toml").unlink()
    run = load_run(folder)
    assert (run.arm, run.seed) == ("subspace-10", 3)


@pytest.mark.parametrize(
    ("config", "arm"),
    [
        ('[codec]\nname = "identity"', "dense"),
        ('[codec]\nname = "exact-k"\n[anchor]\ncadence = 20', "exact-k"),
        ('[codec]\nname = "subspace"\n[anchor]\ncadence = 10', "subspace-10"),
        ('name = "mine"', "mine"),
    ],
)
def test_a_run_outside_a_comparison_is_named_by_its_codec(tmp_path, config, arm):
    folder = write_run(tmp_path / "run", "dense", 1, num_steps=5)
    (folder / "summary.json").write_text('{"arm": null, "seed": 1, "status": "done"}')
    (folder / "config.toml").write_text(config)
    assert load_run(folder).arm == arm


def test_wire_totals_add_every_step_and_count_an_anchor_only_where_it_fired(tmp_path):
    step = {"wire/forward_bytes": 30, "wire/backward_bytes": 20, "wire/dense_bytes": 1000}
    records = [{"step": 1, **step, "wire/anchor_bytes": 100}, {"step": 2, **step}]
    run = run_with_metrics(tmp_path / "run", "".join(json.dumps(r) + "\n" for r in records))
    totals = run.wire_totals()
    assert totals.parts == {"forward": 60, "backward": 40, "anchor": 100, "side_channel": 0}
    assert (totals.num_steps, totals.sent_bytes, totals.dense_bytes) == (2, 200, 2000)
    assert totals.share_of_dense(totals.sent_bytes) == 0.1


def test_rollouts_default_to_the_first_and_the_last_recorded_step(tmp_path):
    run = load_run(write_run(tmp_path / "run", "dense", 1, num_steps=30))
    assert [(r.step, r.prompt, r.score, r.finished) for r in load_rollouts(run)] == [
        (1, "17 + 42", 1.0, True),
        (30, "17 + 42", 1.0, True),
    ]


def test_reports_load_neither_torch_nor_transformers():
    code = "import sys, thinwire.reports.page; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "line", ['{"step": 1%s, "a": 1}' % ("0" * 400), '{"step": 2, "a": 1%s}' % ("0" * 400), "1" * 5000]
)
def test_numbers_no_machine_can_hold_are_left_out(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2.5}\n' + line + "\n")
    (tmp_path / "config.toml").write_text('name = "r"\nseed = 1\n')
    series = load_run(tmp_path).get("a")
    assert series.values.tolist() == [2.5]
