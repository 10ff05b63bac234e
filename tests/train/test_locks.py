"""A directory belongs to one process at a time, for as long as it lives."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from tests.train.runs import recipe
from tests.train.test_compare import TINY, plan
from thinwire.core.errors import UserError
from thinwire.train.checkpoint import list_steps
from thinwire.train.compare import compare
from thinwire.train.config import dump_toml
from thinwire.train.locks import is_empty, locked
from thinwire.train.loop import train
from thinwire.train.places import refuse_used
from thinwire.train.progress import NullObserver, make_display

HOLDER = """
import sys, pathlib
from thinwire.train.locks import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Start processes that hold a directory until they are killed or told to end."""
    started = []

    def hold(directory):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_a_directory_held_by_another_process_is_refused_with_its_pid_and_a_way_out(tmp_path, holder):
    process = holder(tmp_path / "d")
    with pytest.raises(UserError) as caught, locked(tmp_path / "d"):
        pass
    for word in (str(tmp_path / "d"), "another process", f"pid {process.pid}", "--out"):
        assert word in str(caught.value)
    process.communicate("")  # ends in order
    with locked(tmp_path / "d"):
        pass
    assert os.listdir(tmp_path / "d") == []  # nothing stays behind


def test_the_lock_of_a_killed_process_is_free_and_its_file_no_sign_of_use(tmp_path, holder):
    process = holder(tmp_path / "d")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.listdir(tmp_path / "d") == [".lock"]
    assert is_empty(tmp_path / "d")
    refuse_used(tmp_path / "d")  # a new run may start here
    with locked(tmp_path / "d"):
        pass


def test_a_lock_file_that_was_removed_while_held_gives_the_next_holder_its_own(tmp_path):
    """Two holders of two files: each closes its own, and the path names only the second."""
    with locked(tmp_path):
        (tmp_path / ".lock").unlink()
        with locked(tmp_path):
            assert (tmp_path / ".lock").read_text().strip() == str(os.getpid())


def test_a_file_system_without_locks_is_used_without_one(tmp_path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with locked(tmp_path / "d"):
        (tmp_path / "d" / "file").touch()
    assert os.listdir(tmp_path / "d") == ["file"]


def test_a_run_is_not_started_or_resumed_where_another_process_is_at_work(tmp_path, holder):
    out = tmp_path / "out"
    holder(out)
    with pytest.raises(UserError, match="in use by another process"):
        train(recipe("--steps=1"), out, observer=NullObserver())
    (out / "config.toml").write_text(dump_toml(recipe("--steps=1")))
    before = sorted(os.listdir(out))
    with pytest.raises(UserError, match="in use by another process"):
        train(recipe("--steps=1"), out, resume=True, observer=NullObserver())
    assert sorted(os.listdir(out)) == before


@pytest.mark.parametrize("where", ["comparison", "run"])
def test_a_comparison_deletes_nothing_of_a_comparison_or_run_in_use(tmp_path, holder, where):
    """The second call of the same command: a run without a checkpoint used to be removed under its writer."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    planned = plan(path, tmp_path / "out")
    busy = planned.runs[0].out
    busy.mkdir(parents=True)
    (planned.out / "recipe.toml").write_text(TINY)
    (busy / "metrics.jsonl").write_text('{"step": 0}\n')
    holder(planned.out if where == "comparison" else busy)
    assert not list_steps(busy / "checkpoints")
    with pytest.raises(UserError, match="in use by another process"):
        compare(planned, 1, make_display(), lambda *_: None)
    assert (busy / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert not planned.runs[1].out.exists()
