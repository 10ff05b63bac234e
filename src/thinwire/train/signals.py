"""Signals that ask a run or a comparison to stop, and the tie of a worker's life to its parent's."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

PARENT = "THINWIRE_PARENT_PID"
"""Environment variable that tells a comparison's worker whom to follow."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Stop:
    """Signals received, in order: after the first one the run stops at the next step boundary."""

    received: list[int] = field(default_factory=list)

    @property
    def asked(self) -> bool:
        return bool(self.received)


@contextmanager
def finish_step_on_signal() -> Iterator[Stop]:
    """The first SIGINT, SIGTERM or SIGHUP asks for a stop at the step boundary; after it, a SIGINT ends at
    once."""
    stop = Stop()

    def ask(signum: int, frame: FrameType | None) -> None:
        if stop.asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.received.append(signum)

    with _handled(ask):
        yield stop


@contextmanager
def counted_signals() -> Iterator[list[int]]:
    """Signals that ask to stop, in the order received. An exception in their place could hit between the
    start of a process and the note of it, and leave the process behind."""
    stop = Stop()
    with _handled(lambda signum, frame: stop.received.append(signum)):
        yield stop.received


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP go to `handler`; a SIGHUP that is ignored (nohup) stays ignored, and
    outside the main thread signals stay with whoever owns them."""
    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def follow_parent() -> None:
    """In a comparison's worker: a SIGTERM when the parent dies, however it dies (Linux; a no-op elsewhere).

    The run then stops at its step boundary with a checkpoint, as on any SIGTERM.
    """
    parent = os.environ.pop(PARENT, None)  # not for processes of the worker's own
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it died before this call
        os.kill(os.getpid(), signal.SIGTERM)
