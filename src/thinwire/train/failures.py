"""What may end a run for a reason its user can act on, each told in one line with the way to go on."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from thinwire.core.errors import NonFinite, RunFailure, UserError
from thinwire.train import checkpoint
from thinwire.train.rundir import RunDir

_ALLOCATOR = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
"""What torch's CPU allocators say in a plain RuntimeError."""


@contextmanager
def explained(
    where: str, way_on: Callable[[], str], keep: Callable[[Exception], None] | None = None
) -> Iterator[None]:
    """A bad number, a wrong input, a failing disk or too little memory in the block becomes one line, after
    `keep` has saved what can be saved; any other exception is a fault of thinwire's own and passes."""
    try:
        yield
    except (NonFinite, UserError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RunFailure) or (isinstance(error, RuntimeError) and not is_out_of_memory(error)):
            raise
        lost = ""
        try:
            if keep is not None:
                keep(error)
        except (OSError, MemoryError, RuntimeError) as second:  # a GPU past saving, a disk that is full too
            lost = f"; the last whole step could not be saved ({second})"
        raise told(error, where, way_on() + lost) from error


@contextmanager
def cleared_on_failure(directory: Path) -> Iterator[None]:
    """What the block puts into `directory` is removed if it fails, so that the name can be used later."""
    before = set(directory.iterdir())
    try:
        yield
    except BaseException as error:
        for entry in set(directory.iterdir()) - before:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not isinstance(error, OSError):
            raise
        raise RunFailure(
            f"--out {directory} cannot be written: {error.strerror or error}; make room, or name another"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's or the CPU's allocator gave up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _ALLOCATOR)


def told(error: BaseException, where: str, way_on: str) -> UserError | RunFailure:
    """The error as one line: where it happened, what it was, how to go on."""
    if isinstance(error, UserError):
        return UserError(f"{where}: {error}; {way_on}")
    if isinstance(error, NonFinite):
        return RunFailure(
            f"{where} refused: {error.series} was the first series that is not finite ({error}); {way_on}"
        )
    if isinstance(error, OSError):
        return RunFailure(f"{where}: {error.strerror or error}; {way_on}")
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return RunFailure(
        f"{where}: out of memory ({reason}); in a new run set rl.micro_batch_rows, sampling.batch_rows, "
        f"validation.batch_rows or rl.logprob_chunk_tokens lower, or free memory and {way_on}"
    )


def resumable(run: RunDir) -> str:
    """How to go on with the run, and from where."""
    steps = checkpoint.list_steps(run.checkpoints)
    where = f"from step {steps[-1]}" if steps else "from the start"
    return f"resume {where} with: thinwire train --resume {run.path}"
