"""Files and folders that are whole or not there: written beside their place, then put into it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ABANDONED = 3600
"""Seconds without a change after which an unfinished file or folder is that of a killed process."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which it becomes at the end; nothing is left of it after an error.

    An error of the system that names no file, as that of a full disk, gets the name of `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        scratch.chmod(0o644)  # others may read it, as if it had been written in place
        scratch.replace(path)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill in place of the folder `path`, which it becomes at the end; an error leaves nothing of it.

    Several processes may do so at once: each puts a whole folder into the place, and the last one stays. Who has a file
    of the earlier folder open or mapped keeps it. What a killed process had begun is removed an hour later.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_folders(path.parent, f".{path.name}-")
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    (new := scratch / "new").mkdir()
    try:
        yield new
        while not _put(new, path):
            with suppress(FileNotFoundError):  # another process took it away first
                path.replace(Path(tempfile.mkdtemp(dir=scratch)) / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sweep_folders(parent: Path, prefix: str) -> None:
    """Remove folders that killed processes had begun to fill."""
    for begun in parent.glob(f"{prefix}*"):
        if _age(begun) > ABANDONED:
            shutil.rmtree(begun, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes had begun to write in a folder, whatever file it was to become."""
    for begun in folder.glob(".*-????????"):
        if re.fullmatch(r"\..+\.\w+-[a-z0-9_]{8}", begun.name) and begun.is_file() and _age(begun) > ABANDONED:
            begun.unlink(missing_ok=True)


def _put(folder: Path, path: Path) -> bool:
    """Whether `folder` could be moved to `path`, where no folder with files in it may be."""
    try:
        folder.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _age(path: Path) -> float:
    """Seconds since a folder or a file right in it was written; 0 where it is gone by now."""
    with suppress(OSError):
        return time.time() - max(one.stat().st_mtime for one in (path, *path.glob("*/*"), *path.glob("*")))
    return 0.0


def write_bytes(path: Path, content: bytes) -> None:
    """The whole file, or the one that was there before."""
    with replacing(path) as scratch:
        scratch.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As `write_text`; a number that is not finite is an error, for JSON has none."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def appended(path: Path) -> IO[str]:
    """A file that lines are added to, and are in it once they are written; it is there from the start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a+", encoding="utf-8", newline="", buffering=1)


def remove(path: Path) -> None:
    """A file, and what a killed process had begun to write in its place."""
    for scratch in path.parent.glob(f".{path.name}-*"):
        scratch.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
