"""Standard streams: progress that no closed pipe can stop, and a stdout that holds results only."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast


class _Forgiving:
    """Drops what cannot be written; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def forgiving(stream: TextIO | None) -> TextIO:
    """`stream`, except that a write that fails is lost: its reader hung up, its disk is full, it is closed
    (None is a standard stream that was closed before Python started)."""
    return cast(TextIO, _Forgiving(stream or open(os.devnull, "w")))


def open_standard_descriptors() -> None:
    """Descriptors 0, 1 and 2 that were closed at the start (`>&-`) go to /dev/null: the next file opened, a
    run's own, would take their place, and with it whatever a library prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


@contextmanager
def results_apart(*, for_good: bool) -> Iterator[TextIO | None]:
    """A stream for results alone: what else is written to stdout meanwhile, file descriptor 1 included
    (libraries in C, child processes, a user's reward), goes to stderr.

    `for_good` leaves descriptor 1 there afterwards too, for what threads and exit handlers may yet write.
    A stdout that is no file (a test's, a notebook's) is replaced in Python only.
    """
    own = sys.stdout
    with redirect_stdout(forgiving(sys.stderr)):
        if not _is_descriptor(own, 1):
            yield own
            return
        own.flush()
        results = os.fdopen(os.dup(1), "w", encoding=own.encoding, errors=own.errors)
        elsewhere = 2 if _is_descriptor(sys.stderr, 2) else os.open(os.devnull, os.O_WRONLY)
        os.dup2(elsewhere, 1)
        try:
            yield results
        finally:
            with suppress(OSError, ValueError):
                own.flush()
            if not for_good:
                ctypes.CDLL(None).fflush(None)
                os.dup2(results.fileno(), 1)
            with suppress(OSError):  # the error of its last write has been seen already
                results.close()


def _is_descriptor(stream: TextIO | None, number: int) -> bool:
    """Whether the stream writes to this file descriptor, which is open."""
    with suppress(OSError, ValueError, AttributeError):
        return stream is not None and stream.fileno() == number and bool(os.fstat(number))
    return False
