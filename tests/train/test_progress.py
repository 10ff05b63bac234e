"""Progress: what a terminal and a log see, and that stdout stays empty."""

import io

from rich.console import Console

from thinwire.train.progress import BarDisplay, LineDisplay, Pace, duration, make_display

METRICS = {"critic/score/mean": 0.5, "rollout_corr/kl": 1.25, "timing_s/step": 2.0}


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def watch(steps, seconds_a_step, every_seconds=5.0, last_step=None, finish=True):
    stream, clock = io.StringIO(), Clock()
    with LineDisplay(stream, every_seconds, clock) as display:
        observer = display.observer()
        observer.start("exact-k", steps[0], last_step or steps[-1])
        for step in steps:
            clock.now += seconds_a_step
            observer.step(step, METRICS)
        if finish:
            observer.finish({"status": "done", "steps": steps[-1], "seconds": 9.0})
    return stream.getvalue().splitlines()


def shown_steps(lines):
    return [int(line.split("step ")[1].split("/")[0]) for line in lines if "/step" in line]


def test_lines_come_every_few_seconds_and_always_first_and_last():
    assert shown_steps(watch(range(1, 13), seconds_a_step=1.0)) == [1, 6, 11, 12]
    assert shown_steps(watch(range(1, 4), seconds_a_step=60.0)) == [1, 2, 3]


def test_a_run_that_stops_early_still_shows_its_last_step():
    assert shown_steps(watch(range(1, 4), seconds_a_step=0.1, last_step=100)) == [1, 3]


def test_a_line_holds_step_score_gap_pace_and_time_left():
    line = watch([41, 42], seconds_a_step=2.0, every_seconds=0.0, last_step=100)[2]
    assert line == "exact-k: step 42/100  score 0.500  gap 1.250 nats  2.00 s/step  1m 56s left"


def test_the_pace_is_that_of_the_last_twenty_steps():
    clock = Clock()
    pace = Pace(100, clock)
    assert pace.tick(1, 7.0) == (7.0, 7.0 * 99)  # the first step has only its own time
    for step in range(2, 40):
        clock.now += 50.0 if step < 19 else 2.0
        seconds, left = pace.tick(step, 7.0)
    assert (seconds, left) == (2.0, 2.0 * 61)


def test_a_bar_shows_the_same_readings_on_a_terminal():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=140)
    with BarDisplay(console) as display:
        first, second = display.observer(), display.observer()
        first.start("dense seed 1", 1, 4)
        second.start("exact-k seed 1", 3, 4)
        first.step(1, METRICS)
        second.step(3, METRICS)
        second.message("failed: [bold]not markup[/bold]")
        second.finish({"status": "failed"})
    shown = stream.getvalue()
    for expected in ("dense seed 1", "1/4", "3/4", "score 0.500", "gap 1.250 nats", "2.00 s/step"):
        assert expected in shown
    assert "exact-k seed 1: failed: [bold]not markup[/bold]" in shown


def test_a_pipe_gets_lines_a_terminal_bars_and_stdout_nothing(capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    pipe = io.StringIO()
    assert isinstance(make_display(pipe), LineDisplay)
    assert isinstance(make_display(Terminal()), BarDisplay)
    with make_display() as display:
        observer = display.observer()
        observer.start("run", 1, 1)
        observer.step(1, METRICS)
        observer.finish({"status": "done", "steps": 1})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 1/1" in captured.err


def test_durations_read_naturally():
    assert [duration(s) for s in (0.4, 59.6, 185, 7620)] == ["0s", "1m 00s", "3m 05s", "2h 07m"]


class Gone(io.StringIO):
    """A stream whose reader hung up."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise ValueError("I/O operation on closed file")


def test_a_stream_that_cannot_be_written_ends_no_run():
    with make_display(Gone()) as display:
        observer = display.observer()
        observer.start("exact-k", 1, 2)
        observer.step(1, METRICS)
        observer.message("hello")
        observer.finish({"status": "done"})
