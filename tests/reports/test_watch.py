"""The live view: what it reads, that its frames fit, and a real terminal from the first frame to Ctrl-C."""

import fcntl
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.reports.synthetic import write_comparison, write_run
from thinwire.cli import main
from thinwire.core.errors import UserError
from thinwire.reports.follow import Followed, status
from thinwire.reports.frames import frame
from thinwire.reports.live import change, event_text, view
from thinwire.reports.readings import Series
from thinwire.reports.sparkline import BLOCKS, NOT_FINITE, byte_count, number, plain, span, sparkline
from thinwire.reports.watch import Watch

HOSTILE = "\x1b[2J[bold red]x[/] \u202e\r\n\x07 漢字 \ud800 " * 30


def only(directory):
    (look,) = Followed(directory).look()
    return look


def append(path, **record):
    with path.open("a") as stream:
        stream.write(json.dumps(record) + "\n")


@settings(deadline=None)
@given(st.lists(st.floats(), max_size=300), st.integers(-1, 60))
def test_a_sparkline_has_one_known_mark_a_cell_and_never_more_than_its_width(values, width):
    drawn = sparkline(values, width)
    assert len(drawn) == min(max(0, width), len(values))
    assert set(drawn) <= set(BLOCKS + NOT_FINITE)


def test_a_sparkline_rises_with_its_readings_and_marks_what_is_not_finite():
    assert sparkline(np.arange(8.0), 8) == BLOCKS
    assert sparkline([1.0, math.nan, 2.0], 3) == BLOCKS[0] + NOT_FINITE + BLOCKS[-1]
    assert sparkline([5.0, 5.0], 2) == BLOCKS[4] * 2


@given(st.floats())
def test_numbers_are_short_and_keep_their_value(value):
    text = number(value)
    assert len(text) <= 9
    assert float(text) == pytest.approx(value, rel=6e-2, abs=6e-5, nan_ok=True)


def test_units_are_decimal_and_times_are_rounded():
    assert [byte_count(n) for n in (812, 5.2e6, 999_600)] == ["812 B", "5.2 MB", "1.0 MB"]
    assert [span(s) for s in (42, 185, 7620, 273_600)] == ["42s", "3m 05s", "2h 07m", "3d 4h"]


@given(st.text())
def test_text_for_a_terminal_has_nothing_a_terminal_obeys(text):
    assert plain(text).isprintable()


def test_change_is_newest_tenth_less_oldest_of_the_finite_readings():
    steps = np.arange(40)
    assert change(Series(steps, np.where(steps == 3, np.inf, steps.astype(float)))) == pytest.approx(
        38.0 - 1.0
    )
    assert change(Series(steps[:1], np.ones(1))) is None


def test_a_growing_file_is_seen_and_a_half_written_line_waits(tmp_path):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=20)
    followed = Followed(folder)
    assert followed.look()[0].run.last_step == 20
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 21, "rollout_corr')
    assert followed.look()[0].run.last_step == 20
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('/kl": 3.5}\n')
    run = followed.look()[0].run
    assert (run.last_step, run.get("rollout_corr/kl").at(21)) == (21, 3.5)


def test_a_file_written_anew_replaces_what_was_read(tmp_path):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=20)
    followed = Followed(folder)
    followed.look()
    (folder / "metrics.jsonl").write_text('{"step": 1, "rollout_corr/kl": 7.0}\n')
    assert followed.look()[0].run.last_step == 1


def test_a_damaged_file_keeps_the_last_whole_run_and_is_told(tmp_path):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=20)
    followed = Followed(folder)
    followed.look()
    (folder / "summary.json").write_text("{")
    look = followed.look()[0]
    assert look.run.last_step == 20
    assert "summary.json" in look.run.notes[0]


def test_runs_of_a_comparison_may_appear_while_it_is_watched(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    followed = Followed(tmp_path)
    assert followed.look() == []
    write_run(tmp_path / "exact-k" / "seed-1", "exact-k", 1, num_steps=5)
    write_run(tmp_path / "dense" / "seed-1", "dense", 1, num_steps=5)
    assert [look.run.arm for look in followed.look()] == ["dense", "exact-k"]


def test_a_run_is_running_while_a_process_holds_it_whatever_an_old_summary_says(tmp_path):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=5)
    assert only(folder).status == "done"
    (folder / ".lock").write_text(f"{os.getpid()}\n")
    assert only(folder).status == "running"
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    (folder / ".lock").write_text(gone.stdout.decode())
    (folder / "summary.json").unlink()
    assert status(only(folder).run) == "unknown"


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "9" * 30, "\xff"])
def test_a_lock_file_that_names_no_process_is_no_holder(tmp_path, text):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=5)
    (folder / ".lock").write_text(text, encoding="utf-8")
    assert only(folder).status == "done"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A comparison whose texts and events try to act on the terminal."""
    root = write_comparison(tmp_path_factory.mktemp("runs"), seeds=(1, 2), num_steps=60)
    folder = root / "exact-k" / "seed-1"
    for step in range(40):
        append(folder / "events.jsonl", step=step, event=HOSTILE, reason=HOSTILE)
    append(folder / "rollouts.jsonl", step=60, response=HOSTILE, score=1.0)
    (folder / "config.toml").write_text(f"name = {json.dumps(plain(HOSTILE))}\nsteps = 600\n")
    return root


@settings(deadline=None, max_examples=60)
@given(width=st.integers(1, 220), height=st.integers(1, 70), single=st.booleans())
def test_a_frame_fits_any_terminal_and_holds_no_control(hostile, width, height, single):
    looks = Followed(hostile).look() if not single else Followed(hostile / "exact-k" / "seed-1").look()
    lines = frame(HOSTILE, [view(look, HOSTILE) for look in looks], width, height, "footer")
    assert 1 <= len(lines) <= height
    for line in lines:
        assert cell_len(line.plain) <= width
        assert all(char.isprintable() for char in line.plain)


def test_a_frame_shows_series_progress_wire_verdict_and_controller_events(tmp_path):
    folder = write_run(tmp_path / "run", "subspace-20", 3, num_steps=200)
    event = {"step": 20, "event": "controller", "actuator": "view_alignment_weight", "from": 0.0, "to": 0.03}
    append(folder / "events.jsonl", **event, reason="error growth exponent 0.97")
    watched = Watch(folder)
    watched.look()
    text = watched.as_text(None)
    for words in (
        "subspace-20, seed 3",
        "step 200/",
        "gap ",
        "validation",
        "verdict  COLLAPSED",
        "% of dense",
    ):
        assert words in text
    assert "step 20 controller: view_alignment_weight 0 -> 0.03: error growth exponent 0.97" in text
    assert "subspace-20" in event_text({"step": 1, "event": "new", "arm": "subspace-20"})


def test_a_verdict_that_fails_is_told_and_does_not_end_the_view(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=20)
    monkeypatch.setattr("thinwire.reports.verdicts.run_verdict", lambda run: 1 / 0)
    watched = Watch(folder)
    watched.look()
    assert watched.views[0].verdict.startswith("none: ZeroDivisionError")


def test_a_directory_without_any_reading_is_shown(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("name = 'x'\nsteps = 3\n")
    assert main(["watch", str(tmp_path)]) == 0
    assert "step 0/3" in capsys.readouterr().out


def test_watching_changes_nothing_in_the_directory(tmp_path, capsys):
    root = write_comparison(tmp_path / "runs", seeds=(1,), num_steps=20)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}
    folders = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_dir()}
    assert main(["watch", str(root), "--once"]) == 0
    assert main(["watch", str(root), "--json"]) == 0
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()} == before
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_dir()} == folders


def test_json_is_one_object_without_nan(tmp_path, capsys):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=20)
    append(folder / "metrics.jsonl", step=21, **{"actor/grad_norm": math.nan})
    capsys.readouterr()
    assert main(["watch", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    (run,) = found["runs"]
    assert (run["status"], run["step"], found["finished"]) == ("done", 21, True)
    assert run["series"]["actor/grad_norm"]["last"] is None
    assert run["series"]["actor/grad_norm"]["not_finite"] == 1
    assert run["verdict"]


@pytest.mark.parametrize("every", ["0", "nan", "-1", "1e9"])
def test_a_pause_out_of_range_is_refused(tmp_path, capsys, every):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=5)
    assert main(["watch", str(folder), "--every", every]) == 2
    assert "--every must be 0.1 to 3600" in capsys.readouterr().err


def test_a_directory_that_is_none_or_holds_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="existing directory"):
        Followed(tmp_path / "none")
    with pytest.raises(UserError, match="found neither"):
        Followed(tmp_path)


class Terminal:
    """`thinwire watch` on a pseudo-terminal of its own, and all it has drawn."""

    def __init__(self, folder, columns, rows, encoding="utf-8"):
        self.master, slave = pty.openpty()
        self.resize(columns, rows, None)
        # a fixed COLUMNS or LINES, as test runners set them, would stand above the terminal's own size
        own = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thinwire", "watch", str(folder), "--every", "0.2"],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=own | {"TERM": "xterm", "PYTHONIOENCODING": encoding},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.drawn = b""

    def resize(self, columns, rows, notify=signal.SIGWINCH):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if notify:
            self.process.send_signal(notify)

    def read_until(self, done, seconds=60.0):
        """Read what is drawn until `done(frames)`; frames are the texts between two homings of the cursor."""
        until = time.monotonic() + seconds
        while not done(self.frames()):
            assert time.monotonic() < until, self.drawn[-3000:]
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.drawn += os.read(self.master, 1 << 16)
                except OSError:  # the other side is closed
                    self.process.wait(timeout=30)
                    assert done(self.frames()), self.drawn[-3000:]
                    return

    def frames(self):
        text = self.drawn.decode("utf-8", "replace")
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for part in text.split("\x1b[H")]

    def close(self):
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(tmp_path):
    folder = write_run(tmp_path / "run", "exact-k", 1, num_steps=60)
    opened = []

    def start(*size, **options):
        opened.append(Terminal(folder, *size, **options))
        return opened[-1]

    start.folder = folder
    yield start
    for screen in opened:
        screen.close()


@pytest.mark.timeout(180)
def test_on_a_terminal_it_follows_the_run_survives_resizes_and_leaves_on_ctrl_c(terminal):
    screen = terminal(100, 30)
    screen.read_until(lambda frames: "step 60" in frames[-1])
    assert "\x1b[?1049h" in screen.drawn.decode("utf-8", "replace")
    append(terminal.folder / "metrics.jsonl", step=61, **{"rollout_corr/kl": 2.5})
    screen.read_until(lambda frames: "step 61" in frames[-1])
    for columns, rows in ((40, 10), (20, 3), (1, 1), (160, 50)):
        screen.resize(columns, rows)
        num = len(screen.frames())

        def fits(frames, num=num, columns=columns, rows=rows):
            """The last whole frame since the resize; one of the old size may still be on its way."""
            lines = frames[-2].splitlines() if len(frames) > num + 1 else []
            return 0 < len(lines) <= rows and max(map(cell_len, lines)) <= columns

        screen.read_until(fits)
    assert "verdict" in screen.frames()[-2]
    os.write(screen.master, b"\x03")
    screen.read_until(lambda frames: screen.process.poll() is not None)
    screen.read_until(lambda frames: "\x1b[?1049l" in screen.drawn.decode("utf-8", "replace"))
    assert screen.process.wait() == 0
    assert "Traceback" not in screen.drawn.decode("utf-8", "replace")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_gives_the_screen_back(terminal, number):
    screen = terminal(80, 24)
    screen.read_until(lambda frames: "step 60" in frames[-1])
    screen.process.send_signal(number)
    screen.read_until(lambda frames: "\x1b[?1049l" in screen.drawn.decode("utf-8", "replace"))
    screen.process.wait(timeout=30)


@pytest.mark.timeout(120)
def test_a_terminal_without_blocks_gets_ascii(terminal):
    screen = terminal(80, 24, encoding="ascii")
    screen.read_until(lambda frames: "step 60" in frames[-1])
    assert screen.drawn.isascii()
