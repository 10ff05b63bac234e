"""A made-up package `wandb`, and runs that are tracked with it."""

import json

from tests.train.runs import BASE, recipe
from thinwire.train import loop
from thinwire.train.config import resolve
from thinwire.train.progress import NullObserver
from thinwire.train.rundir import RunDir
from thinwire.train.trackers import Trackers

WANDB = """
import ctypes, json, os, signal, sys, time

def note(**what):
    with open(os.path.join({folder!r}, "got.jsonl"), "a") as file:
        print(json.dumps(what), file=file)

class Run:
    url = "https://tracker.invalid/run"
    dir = "nowhere/files"
    def define_metric(self, *names, **details): pass
    def log(self, row):
        {log}
        note(row=row)
    def finish(self, exit_code):
        {finish}
        note(exit_code=exit_code)

def init(**details):
    {start}
    note(start=details)
    return Run()
"""


def got(tmp_path, key):
    lines = [json.loads(line) for line in (tmp_path / "got.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


class Listener(NullObserver):
    def __init__(self):
        self.messages = []

    def message(self, text):
        if "tracker" in text or "wandb" in text:  # not the loop's own notes
            self.messages.append(text)


def tracked(out, *settings, names="wandb", resume=False):
    """A run with trackers that ends well; what it said."""
    listener = Listener()
    own = recipe(f"--trackers.names={names}", *settings)
    assert loop.train(own, out, resume=resume, observer=listener)["status"] == "done"
    return listener.messages


def failures(out):
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "tracker_failed"]


def raw_lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def begun(tmp_path, **settings):
    """Trackers of a run directory without a run, and what they said."""
    folder, said = tmp_path / "r", []
    folder.mkdir()
    own = resolve({**BASE, "trackers": {"names": ["wandb"], **settings}})
    return Trackers(own, "dense", RunDir(folder), 0, said.append), said
