"""Signals: what is asked to stop stops at a step boundary, and no run outlives its comparison."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.train.test_compare import SLOW, TINY, wait_for
from tests.train.test_loop import launch
from thinwire.train.checkpoint import list_steps
from thinwire.train.signals import counted_signals, finish_step_on_signal

STUBBORN = """
import time
calls = []

def stuck(problem, response):
    calls.append(1)
    if len(calls) > 10:  # 4 of the first validation, 4 of step 1: within step 2
        open("stuck", "w").close()
        time.sleep(600)
    return len(calls) % 2

"""


@pytest.fixture
def restored():
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("context", [counted_signals, finish_step_on_signal])
def test_a_hangup_that_nohup_ignores_stays_ignored(restored, context):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with context() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not getattr(stop, "received", stop)
        signal.raise_signal(signal.SIGTERM)
        assert getattr(stop, "received", stop) == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_only_a_second_ctrl_c_ends_at_once(restored):
    with finish_step_on_signal() as stop:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_says_how_to_go_on_and_the_run_counts_as_interrupted(tmp_path):
    """The reward interrupts its own process twice within step 3."""
    (tmp_path / "impatient.py").write_text(
        "import os, signal\ncalls = []\ndef reward(problem, response):\n    calls.append(1)\n"
        "    if len(calls) > 16 + 2 * 16:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return len(calls) % 2\n"
    )
    process = launch(tmp_path, "--steps=9", "--task.reward=impatient:reward", "--checkpoint.every=1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "resume from step 2 with: thinwire train --resume out" in errors.strip().splitlines()[-1]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "interrupted"


def comparison(tmp_path, reward):
    """A comparison of one run, started as a process; and the run's directory."""
    (tmp_path / "tiny.toml").write_text(TINY)
    command = [sys.executable, "-m", "thinwire", "compare", "tiny.toml", "--arms", "exact-k", "--jobs", "1",
               "--out", "out", "--json", "--steps=500", "--task.reward", reward]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    )
    return process, tmp_path / "out" / "exact-k" / "seed-1"


def test_a_comparison_stopped_twice_kills_its_runs_and_is_interrupted_not_failed(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    process, run = comparison(tmp_path, "stubborn:stuck")
    wait_for(lambda: (tmp_path / "stuck").exists())
    worker = int((run / ".lock").read_text())
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.5)  # the run is stuck within its step
    process.send_signal(signal.SIGINT)
    stdout, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert json.loads(stdout)["arms"]["exact-k"]["seeds"]["1"]["status"] == "interrupted"
    assert not is_alive(worker)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is of Linux")
def test_a_run_whose_comparison_is_killed_stops_at_its_step_boundary(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    process, run = comparison(tmp_path, "slow:slow")
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") > 2)
    worker = int((run / ".lock").read_text())
    process.kill()
    process.communicate()
    wait_for(lambda: not is_alive(worker), seconds=60)
    (step,) = list_steps(run / "checkpoints")
    assert 1 <= step < 500
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"


def test_a_worker_that_ends_with_0_before_its_run_is_done_has_failed(tmp_path):
    (tmp_path / "leaving.py").write_text("import os\ndef leave(problem, response):\n    os._exit(0)\n")
    process, _ = comparison(tmp_path, "leaving:leave")
    stdout, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    failed = json.loads(stdout)["arms"]["exact-k"]["seeds"]["1"]
    assert failed["status"] == "failed"
    assert "exit status 0" in failed["error"]


def is_alive(pid):
    """Whether the process runs; one that nobody waits for any more (a zombie) does not."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
