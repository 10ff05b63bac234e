"""Seconds of each phase of a step, and the memory of the process."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Wall-clock seconds by phase name, summed within a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def peak_rss_bytes() -> float:
    """Peak resident memory of this process, bytes (ru_maxrss is KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
