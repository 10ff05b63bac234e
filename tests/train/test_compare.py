"""Comparisons: fair ones only, every run on its own, nothing lost."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib

import pytest

from thinwire.core.errors import UserError
from thinwire.train.compare import compare, make_plan
from thinwire.train.config import dump_toml, resolve
from thinwire.train.progress import LineDisplay
from thinwire.train.workers import Tail, worker_command

TINY = """
name = "tiny"
seed = 1
steps = 2
[model]
stages = 2
[task]
num_validation = 4
[sampling]
prompts = 2
group_size = 2
max_new_tokens = 3
[codec]
name = "exact-k"
[checkpoint]
models = false
[arms.dense]
codec = { name = "identity" }
[arms.exact-k]
codec = { name = "exact-k" }
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def plan(recipe, out, arms=(), seeds=(), settings=(), vary=()):
    return make_plan(recipe, arms, seeds, settings, vary, out)


def refused(*arguments, **named):
    with pytest.raises(UserError) as error:
        plan(*arguments, **named)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_arm_meets_every_seed_with_its_own_resolved_recipe(recipe, tmp_path):
    planned = plan(recipe, tmp_path / "out", seeds=(3, 5), settings=("--steps=7",))
    assert [(run.arm, run.seed) for run in planned.runs] == [
        ("dense", 3), ("exact-k", 3), ("dense", 5), ("exact-k", 5),
    ]  # fmt: skip
    assert [run.recipe.seed for run in planned.runs] == [3, 3, 5, 5]
    assert {run.recipe.steps for run in planned.runs} == {7}
    assert planned.runs[3].out == tmp_path / "out" / "exact-k" / "seed-5"
    assert [run.seed for run in plan(recipe, tmp_path / "out").runs] == [1, 1]  # the recipe's own seed


def test_a_worker_command_repeats_exactly_the_planned_recipe(recipe, tmp_path):
    planned = plan(recipe, tmp_path / "out", settings=("--steps=7", "--rl.clip_low=0.1"), seeds=(9,))
    command = worker_command(planned.runs[1], planned, resume=False)
    settings = [part for part in command if part.startswith("--") and "=" in part]
    tables = resolve(tomllib.loads(TINY), settings, command[command.index("--arm") + 1])
    assert tables == planned.runs[1].recipe
    assert worker_command(planned.runs[1], planned, resume=True)[-2:] == [
        "--resume",
        str(planned.runs[1].out),
    ]


def test_arms_that_differ_elsewhere_are_refused_until_vary_names_it(recipe, tmp_path):
    recipe.write_text(TINY + "rl = { clip_low = 0.1 }\n")
    message = refused(recipe, tmp_path / "out")
    for word in ("dense", "exact-k", "rl.clip_low", "0.2", "0.1", "--vary rl.clip_low"):
        assert word in message
    for prefix in ("rl", "rl.clip_low"):
        assert len(plan(recipe, tmp_path / "out", vary=(prefix,)).runs) == 2
    assert "rl.clip_low" in refused(recipe, tmp_path / "out", vary=("rl.clip", "optimizer"))


def test_codec_and_anchor_may_differ(recipe, tmp_path):
    recipe.write_text(TINY + "anchor = { cadence = 3, delay = 1 }\n")
    assert len(plan(recipe, tmp_path / "out").runs) == 2


@pytest.mark.parametrize(
    ("text", "arms", "words"),
    [
        (TINY, ("dens",), ["'dens'", "did you mean 'dense'"]),
        (TINY.split("[arms")[0], (), ["no [arms.NAME] tables"]),
        (TINY + "seed = 4\n", (), ["arms.exact-k.seed = 4", "--seeds"]),
        (TINY + '[arms."../up"]\n', (), ["'../up'", "letters"]),
    ],
)
def test_arms_that_cannot_run_are_refused(recipe, tmp_path, text, arms, words):
    recipe.write_text(text)
    message = refused(recipe, tmp_path / "out", arms=arms)
    assert all(word in message for word in words), message


def test_an_output_directory_of_something_else_is_refused(recipe, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert len(plan(recipe, out).runs) == 2  # empty is fine
    (out / "thesis.tex").write_text("x")
    assert "is not empty and holds no comparison" in refused(recipe, out)
    assert (out / "thesis.tex").exists()
    assert "is a file" in refused(recipe, recipe)


def test_runs_of_another_recipe_are_refused_with_the_key_that_differs(recipe, tmp_path):
    out = tmp_path / "out"
    run = plan(recipe, out).runs[0]
    run.out.mkdir(parents=True)
    (out / "recipe.toml").write_text(TINY)
    (run.out / "config.toml").write_text(dump_toml(run.recipe))
    assert len(plan(recipe, out).runs) == 2
    message = refused(recipe, out, settings=("--optimizer.learning_rate=0.5",))
    assert all(word in message for word in ("optimizer.learning_rate = 1e-06", "0.5", "--out"))


def test_jobs_below_one_are_refused(recipe, tmp_path):
    planned = plan(recipe, tmp_path / "out")
    with pytest.raises(UserError, match="--jobs must be at least 1 process, got 0"):
        compare(planned, 0, LineDisplay(io.StringIO()), lambda *_: None)
    assert not (tmp_path / "out").exists()


def test_a_tail_gives_whole_lines_once_and_starts_over_after_a_cut(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.new_rows() == []
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in tail.new_rows()] == [1, 2]
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert [row["step"] for row in tail.new_rows()] == [3]
    file.write_text('{"step": 1}\n')
    assert [row["step"] for row in tail.new_rows()] == [1]


KILLER = """
import os, signal

def kill_at_seven(problem, response):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_costs_nothing_but_itself_and_a_second_call_runs_only_what_is_missing(
    recipe, tmp_path, monkeypatch
):
    """One arm's reward kills its own process; --vary lets the arms differ in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "killer.py").write_text(KILLER)
    recipe.write_text(TINY + 'task = { reward = "killer:kill_at_seven" }\n')
    pages, stream, out = [], io.StringIO(), tmp_path / "out"

    def go():
        planned = plan(recipe, out, vary=("task.reward",))
        return compare(planned, 2, LineDisplay(stream), lambda *paths: pages.append(paths))

    summary = go()
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["arms"]["dense"]["seeds"]["1"]["status"] == "done"
    assert summary["arms"]["dense"]["mean"]["at"]["2"]["gap"]["n"] == 1
    failed = summary["arms"]["exact-k"]["seeds"]["1"]
    assert (failed["status"], failed["error"]) == ("failed", "killed by SIGKILL")
    assert pages == [(out, out / "report.html")]
    assert "dense seed 1: step 2/2" in stream.getvalue()
    assert "exact-k seed 1: failed: killed by SIGKILL" in stream.getvalue()
    finished = (out / "dense" / "seed-1" / "metrics.jsonl").stat()
    assert go()["status"] == "failed"
    assert (out / "dense" / "seed-1" / "metrics.jsonl").stat().st_mtime_ns == finished.st_mtime_ns


def wait_for(condition, seconds=120):
    """Poll until the condition holds; the limit only bounds a hang on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


SLOW = """
import time

def slow(problem, response):
    time.sleep(0.05)
    return 0.0
"""


def test_a_stopped_comparison_leaves_no_process_and_goes_on_where_it_was(recipe, tmp_path):
    """SIGTERM to the parent only: its run finishes its step, writes a checkpoint and ends. Given again, the
    same command resumes. A slow reward (0.2 s a step) leaves room to stop between two steps."""
    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "thinwire", "compare", str(recipe), "--arms", "exact-k", "--jobs", "1",
               "--out", str(out), "--json", "--steps=15", "--task.reward", "slow:slow"]  # fmt: skip
    metrics = out / "exact-k" / "seed-1" / "metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr.decode()
    stopped = json.loads(stdout)["arms"]["exact-k"]["seeds"]["1"]
    assert stopped["status"] == "interrupted"
    assert 1 <= stopped["steps"] < 15
    assert os.listdir(out / "exact-k" / "seed-1" / "checkpoints") == [f"step-{stopped['steps']}"]
    assert metrics.read_text().count("\n") == stopped["steps"] + 1  # nothing is writing any more
    again = subprocess.run(command, capture_output=True, timeout=300, check=True, cwd=tmp_path)
    done = json.loads(again.stdout)["arms"]["exact-k"]["seeds"]["1"]
    assert (done["status"], done["steps"]) == ("done", 15)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(16))
