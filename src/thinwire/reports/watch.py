"""The live view of a run or a comparison: look, draw, wait, until Ctrl-C. It only ever reads files."""

import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from thinwire.core.errors import UserError
from thinwire.reports.follow import Followed
from thinwire.reports.frames import frame
from thinwire.reports.live import RunView, Verdicts, as_object, is_finished, view
from thinwire.reports.sparkline import BLOCKS, plain
from thinwire.reports.verdicts import verdict_text

_LEAVE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ASCII = str.maketrans(BLOCKS + "…━─", "_.,-=+*#" + "~=-")


class Watch:
    """A directory and how it stood at the last look."""

    def __init__(self, directory: Path) -> None:
        self._followed, self._verdicts = Followed(directory), Verdicts(verdict_text)
        self.views: list[RunView] = []

    def look(self) -> None:
        """Read what the runs have written since."""
        looks = self._followed.look()
        self.views = [view(look, self._verdicts.of(look.run)) for look in looks]

    @property
    def title(self) -> str:
        root = self._followed.root
        return plain(root.name or str(root.resolve()))

    def as_object(self) -> dict[str, Any]:
        """The state as one JSON object."""
        return {
            "directory": str(self._followed.root),
            "finished": bool(self.views) and all(map(is_finished, self.views)),
            "runs": [as_object(shown) for shown in self.views],
        }

    def as_text(self, stream: TextIO | None) -> str:
        """One frame for a stream: its width and colours where it is a terminal, all lines in any case."""
        console = _console(stream) if stream is not None and is_screen(stream) else None
        width = console.width if console else 100
        lines = frame(self.title, self.views, width, 24 + len(self.views))
        buffer = StringIO()
        target = Console(file=buffer, width=width, force_terminal=bool(console), no_color=not console)
        for line in _encodable(lines, stream):
            target.print(line, soft_wrap=True)
        return "\n".join(row.rstrip() for row in buffer.getvalue().splitlines())


def watch(watched: Watch, stream: TextIO, every_seconds: float) -> None:
    """Draw on the terminal `stream` until SIGINT, SIGTERM or SIGHUP; its screen is as before afterwards.

    A resize redraws at once, Ctrl-Z gives the screen back meanwhile. A look that takes long makes the pause
    after it ten times as long, so that at most a tenth of a core is taken from the run; a second signal
    during such a look ends it there.
    """
    console = _console(stream)
    drawn = _Drawn(watched, f"Ctrl-C leaves, the run goes on; every {every_seconds:g} s")
    watched.look()
    with _signals() as heard, Live(drawn, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        due = time.monotonic() + every_seconds
        while True:
            numbers = heard(max(0.0, due - time.monotonic()))
            if any(number in _LEAVE for number in numbers):
                return
            if signal.SIGTSTP in numbers:
                live.stop()
                os.kill(os.getpid(), signal.SIGSTOP)  # comes back here in the foreground
                live.start()
            if not numbers:
                started = time.monotonic()
                watched.look()
                now = time.monotonic()
                due = now + max(every_seconds, 10 * (now - started))
            live.refresh()


def refuse_interval(every_seconds: float) -> None:
    """A tenth of a second to an hour."""
    if not (math.isfinite(every_seconds) and 0.1 <= every_seconds <= 3600):
        raise UserError(f"--every must be 0.1 to 3600 seconds, got {every_seconds:g}")


def _console(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False, markup=False, emoji=False)


class _Drawn:
    """The frame at the size the terminal has when it is drawn."""

    def __init__(self, watched: Watch, footer: str) -> None:
        self._watched, self._footer = watched, footer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width, height = console.size
        lines = frame(self._watched.title, self._watched.views, width, height, self._footer)
        yield from _encodable(lines, console.file)


def is_screen(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that can redraw."""
    with suppress(OSError, ValueError):
        return stream is not None and stream.isatty() and not _console(stream).is_dumb_terminal
    return False


def _encodable(lines: Sequence[Text], stream: IO[str] | None) -> list[Text]:
    """`lines` as the stream can write them: bars in ASCII where it has no blocks, "?" for what is left."""
    try:
        "".join(line.plain for line in lines).encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        for line in lines:  # character for character, so that styles stay where they are
            line.plain = line.plain.translate(_ASCII).encode("ascii", errors="replace").decode("ascii")
    return list(lines)


@contextmanager
def _signals() -> Iterator[Callable[[float], bytes]]:
    """A function that waits at most so many seconds and returns the signals that came meanwhile.

    They arrive through a pipe, so that none is lost between a look and a wait, and no handler runs in the
    middle of a drawing.
    """
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    left: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number in _LEAVE:
            left.append(number)
            if len(left) > 1:
                raise KeyboardInterrupt

    def heard(seconds: float) -> bytes:
        if not select.select([reader], [], [], seconds)[0]:
            return b""
        return os.read(reader, 1 << 12)

    handled = (*_LEAVE, signal.SIGWINCH, signal.SIGTSTP)
    before = {number: signal.signal(number, note) for number in handled}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield heard
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
