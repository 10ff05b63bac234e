"""One process at a time in a directory: an advisory lock that the kernel drops with its holder."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.core.errors import UserError

LOCK_NAME = ".lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory`, made if it is absent, until the block ends or the process dies; UserError if another
    process holds it.

    The lock is flock(2) on DIRECTORY/.lock, whose text is the holder's process id; a file that a killed
    holder left behind is free. Not covered: file systems without flock (no lock is held there) or whose
    flock does not reach other machines.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _open_locked(directory / LOCK_NAME)
    except OSError as error:
        raise UserError(f"--out {directory} cannot be written: {error.strerror}; name another") from None
    try:
        yield
    finally:
        with suppress(OSError):  # a lock that stays is free as soon as it is closed
            (directory / LOCK_NAME).unlink()  # while it is held: no one can hold another one
        os.close(descriptor)


def is_empty(directory: Path) -> bool:
    """Whether a directory holds nothing, but for the lock of a process that ended before it wrote."""
    return all(entry.name == LOCK_NAME for entry in directory.iterdir())


def _open_locked(path: Path) -> int:
    """A descriptor that holds the file `path` names; one that its holder removed meanwhile is opened anew."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _flock(descriptor)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"{path.parent} is in use by another process{f' (pid {holder})' if holder else ''}; "
                "wait until it ends, stop it, or name another --out"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):  # a file system without locks
            raise
