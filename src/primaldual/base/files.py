"""Files that are whole or not there: written beside their place, then put into it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which it becomes at the end; nothing is left of it after an error.

    An error of the system that names no file, as that of a full disk, gets the name of `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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


def remove(path: Path) -> None:
    """A file, and what a killed process had begun to write in its place."""
    for scratch in path.parent.glob(f".{path.name}-*"):
        scratch.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
