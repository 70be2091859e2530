"""Work that one process does at a time: a file that it holds for as long as it lives.

The system lets go of what a killed process held, so that nothing stays behind. Where a system has no such locks nobody
is kept waiting, and work may be done twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from .files import appended

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class BusyError(RuntimeError):
    """Another process does this work."""

    def __init__(self, path: Path, process: str) -> None:
        super().__init__(f"process {process or 'of another kind'} holds {path}")
        self.path, self.process = path, process


@contextmanager
def holding(paths: Sequence[Path]) -> Iterator[None]:
    """Inside, no other process holds one of these files; a `BusyError` where one does."""
    with ExitStack() as stack:
        for path in sorted(paths):
            stack.enter_context(_held(path))
        yield


@contextmanager
def _held(path: Path) -> Iterator[None]:
    stream = _locked(path)
    try:
        yield
    finally:
        if stream is not None:
            path.unlink(missing_ok=True)  # while it is held: who waits for it finds that it is another file by then
            stream.close()


def _locked(path: Path) -> IO[str] | None:
    """The open file, which says whose it is; None where the file system has no locks."""
    if fcntl is None:
        return None
    while True:
        stream = appended(path)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            process = stream.read().strip()
            stream.close()
            raise BusyError(path, process) from None
        except OSError:
            stream.close()
            return None
        if _is_at(path, stream):
            stream.truncate(0)
            stream.write(f"{os.getpid()}\n")
            return stream
        stream.close()  # who held it before has taken it away


def _is_at(path: Path, stream: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False
