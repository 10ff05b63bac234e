"""Nothing that a tracker does ends, changes or holds up a run.

The failures are those of a made-up package `wandb`, run in real processes.
"""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.train.runs import run
from tests.train.test_compare import TINY, wait_for
from tests.train.test_loop import metrics
from tests.train.tracking import begun, failures, got, raw_lines, tracked
from thinwire.train import checkpoint, trackers

HANG = "time.sleep(600)"
HANG_WITH_THE_LOCK = "ctypes.PyDLL(None).sleep(600)"


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"start": "raise RuntimeError('no such project')"}, "RuntimeError: no such project"),
        ({"start": "import nothing_of_the_kind"}, "No module named 'nothing_of_the_kind'"),
        ({"start": "sys.exit(0)"}, "SystemExit: 0"),
        ({"start": HANG}, "it had not finished 1 s after"),
        ({"log": "raise ValueError('first line\\nsecond')"}, "ValueError: first line second"),
        ({"log": HANG}, "it had not finished 1 s after"),
        ({"log": HANG_WITH_THE_LOCK}, "it had not finished 1 s after"),
        ({"log": "os._exit(0)"}, "its process ended with exit status 0"),
        ({"log": "os.kill(os.getpid(), signal.SIGKILL)"}, "killed by signal 9"),
        ({"log": "os.kill(0, signal.SIGTERM)"}, "killed by signal 15"),
        ({"log": "os.closerange(0, 256); time.sleep(600)"}, "it had not finished 1 s after"),
        ({"finish": "raise OSError('disk')"}, "OSError: disk"),
        ({"finish": HANG}, "it had not finished 1 s after"),
    ],
)  # fmt: skip
def test_a_tracker_that_fails_is_told_of_once_and_the_run_ends_well(tmp_path, fake, behaviour, reason):
    """All would end or hang a run that called them: sleeps are of 600 s, the test's limit is 300."""
    fake(**behaviour)
    out = tmp_path / "r"
    messages = tracked(out, "--trackers.flush_seconds=1" if "sleep" in str(behaviour) else "--seed=1")
    (failure,) = failures(out)
    assert reason in failure["reason"]
    assert failure["tracker"] == "wandb"
    (told,) = [message for message in messages if "tracker wandb failed" in message]
    assert failure["reason"] in told
    assert "\n" not in told
    assert [line["step"] for line in raw_lines(out)] == [0, 1, 2, 3]


def is_running(pid):
    """Whether a process of this machine runs; one that only waits to be counted by its parent does not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize(
    "behaviour",
    [
        "__import__('atexit').register(time.sleep, 600)",
        "__import__('threading').Thread(target=time.sleep, args=(600,)).start()",
        "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]",
        "child = os.fork(); child or time.sleep(600); note(child=child)",
    ],
    ids=["exit handler", "thread", "signals", "child"],
)
def test_what_a_tracker_leaves_behind_in_its_process_keeps_no_one(tmp_path, fake, behaviour):
    fake(start=behaviour)
    out = tmp_path / "r"
    assert len(tracked(out)) == 1  # its address
    for child in got(tmp_path, "child"):
        wait_for(lambda child=child: not is_running(child))
    assert got(tmp_path, "exit_code") == [0]
    assert not (out / "events.jsonl").exists()


def test_trackers_change_no_bit_of_a_run(tmp_path, fake):
    fake(start="import random; random.seed(1); os.environ['OMP_NUM_THREADS'] = '7'")
    run(tmp_path / "without")
    tracked(tmp_path / "with", names="wandb,tensorboard")
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")
    ends = [checkpoint.load(tmp_path / name / "checkpoints" / "step-3") for name in ("with", "without")]
    assert ends[0].engine.keys() == ends[1].engine.keys()
    assert all(torch.equal(tensor, ends[1].engine[name]) for name, tensor in ends[0].engine.items())


def log_until(sender, done, seconds=60):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        sender.log({"step": 1, "x": 1.0})
        time.sleep(0.01)


def test_a_hung_tracker_never_makes_the_run_wait_and_is_given_up_when_too_far_behind(
    tmp_path, fake, monkeypatch
):
    """4 MB in lines of 4 kB: far more than a pipe holds (64 kB). A write that waited would wait 600 s."""
    monkeypatch.setattr(trackers, "MAX_WAITING_BYTES", 2 << 20)
    fake(log=HANG_WITH_THE_LOCK)
    sender, said = begun(tmp_path)
    row = {f"series/{number}": 1 / 3 for number in range(120)}
    longest = 0.0
    for step in range(1000):
        started = time.monotonic()
        sender.log({"step": step, **row})
        longest = max(longest, time.monotonic() - started)
    assert longest < 5  # a line takes well under a millisecond; the rest is for a busy machine
    assert "MiB of metrics behind" in failures(tmp_path / "r")[0]["reason"]
    started = time.monotonic()
    sender.close("done")
    assert time.monotonic() - started < 5  # nothing is left to wait for
    assert len([line for line in said if "failed" in line]) == len(failures(tmp_path / "r")) == 1


def test_a_line_that_takes_too_long_ends_the_tracker_while_the_run_goes_on(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(trackers, "LINE_SECONDS", 1)
    fake(log=HANG_WITH_THE_LOCK)
    sender, said = begun(tmp_path)
    log_until(sender, lambda: (tmp_path / "r" / "events.jsonl").exists())
    assert failures(tmp_path / "r")[0]["reason"].startswith("hung: a line took it over 1 s")
    sender.close("done")
    assert len(said) == 2  # its address, and that it failed


def test_a_tracker_whose_run_is_killed_finishes_by_itself_even_if_it_hangs(tmp_path, fake):
    """Its pipe ends without a last word; the alarm needs no parent."""
    for log, exit_code in (("pass", [1]), (HANG_WITH_THE_LOCK, [1])):  # nothing new from the second one
        fake(log=log)
        start = {"tracker": "wandb", "project": "p", "group": "", "name": "n", "id": "i", "mode": None}
        start |= {"folder": str(tmp_path), "config": {}, "start_seconds": 60, "line_seconds": 1}
        process = subprocess.Popen(
            [sys.executable, "-m", "thinwire.train.tracker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        process.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in (start, {"step": 1})))
        process.stdin.write(b'{"step": 2, "half a li')
        process.stdin.close()
        assert process.wait(60) == (0 if log == "pass" else -signal.SIGALRM)
        process.stdout.close()
        assert got(tmp_path, "exit_code") == exit_code


def test_with_json_stdout_holds_one_object_whatever_a_tracker_prints(tmp_path, fake):
    fake(start="print('hello')", log="os.write(1, b'hello'); os.system('echo hello')", finish="print('bye')")
    (tmp_path / "tiny.toml").write_text(TINY)
    command = [sys.executable, "-m", "thinwire", "train", "tiny.toml", "--trackers.names=wandb", "--out=out"]
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"
    assert "hello" not in done.stderr
    log = (tmp_path / "out" / "trackers" / "wandb.log").read_text()
    assert "hello" in log
    assert "bye" in log
