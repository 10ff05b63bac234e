"""The command's streams: results alone on stdout, errors in one line, and no pipe that can end a run."""

import json
import os
import subprocess
import sys

import pytest

from tests.train.test_compare import TINY
from thinwire.cli import main


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A small recipe in an otherwise empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    return "tiny.toml"


NOISY = """
import atexit, ctypes, os, sys
libc = ctypes.CDLL(None)
atexit.register(print, "noise")

def noisy(problem, response):
    print("noise")
    sys.__stdout__.write("noise")
    os.write(1, b"noise")
    os.system("echo noise")
    libc.printf(b"noise")
    return len(response) % 2
"""


def started(*arguments, **streams):
    return subprocess.run([sys.executable, "-m", "thinwire", *arguments], timeout=120, **streams)


def test_stdout_holds_one_json_object_whatever_a_reward_prints_there(recipe, tmp_path):
    """Python's print, its raw stream, the file descriptor, a child, C's stdio and an exit handler."""
    (tmp_path / "noisy.py").write_text(NOISY)
    arguments = ["train", recipe, "--json", "--steps", "1", "--task.reward", "noisy:noisy"]
    done = started(*arguments, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"
    assert done.stderr.count(b"noise") >= 5 * 4 + 1


@pytest.mark.parametrize("closed", ["pipe", "descriptor"])
def test_a_run_whose_stderr_is_gone_goes_on(recipe, tmp_path, closed):
    reader, writer = os.pipe()
    os.close(reader)
    (tmp_path / "noisy.py").write_text("def noisy(problem, response):\n    print('noise')\n    return 0\n")
    arguments = ["train", recipe, "--json", "--steps", "1", "--task.reward", "noisy:noisy"]
    command = 'exec "$0" -m thinwire "$@"' + (" 2>&-" if closed == "descriptor" else "")
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, *arguments], stdout=subprocess.PIPE, stderr=writer, timeout=120
    )
    os.close(writer)
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "done"


def test_a_stdout_that_is_full_is_one_line():
    with open("/dev/full", "w") as full:
        done = started("codecs", "list", "--json", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.startswith(b"thinwire: ")
    assert b"No space left" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("by\nzero"), SystemExit(0)])
def test_an_unforeseen_error_is_one_line_with_its_type_and_the_way_to_its_traceback(
    capsys, monkeypatch, error
):
    def fail(options):
        raise error

    monkeypatch.setattr("thinwire.codec_commands.list_codecs", fail)
    assert main(["codecs", "list", "--json"]) == 1
    captured = capsys.readouterr()
    line = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}; set THINWIRE_DEBUG=1"
    assert captured.err.startswith(f"thinwire: {line}")
    assert captured.err.count("\n") == 1
    assert json.loads(captured.out)["exit_status"] == 1
    monkeypatch.setenv("THINWIRE_DEBUG", "1")
    assert main(["codecs", "list"]) == 1
    assert "raise error" in capsys.readouterr().err


def test_standard_streams_that_are_closed_never_become_files_of_the_run(recipe, tmp_path):
    """Else the first files opened would get their numbers, and with them whatever a library prints."""
    (tmp_path / "looking.py").write_text(
        "import os\nnull = os.stat(os.devnull)\ndef look(problem, response):\n"
        "    assert all(os.path.samestat(os.fstat(number), null) for number in range(3))\n    return 0\n"
    )
    arguments = ["train", recipe, "--out", "out", "--steps", "1", "--task.reward", "looking:look"]
    command = 'exec "$0" -m thinwire "$@" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, *arguments], timeout=120)
    assert done.returncode == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "done"
