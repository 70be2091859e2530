"""The folder that the demo writes into: nothing of others is touched, nothing is left half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..base.files import write_bytes
from .settings import DemoError

MARK = "primaldual demo"
FILES = ("results.json", "heads.png", "report.html")


def check_folder(folder: Path, force: bool) -> None:
    """Raise before any work is done when `folder` cannot or should not be written to."""
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"{folder} is a file; give another folder with --output", 2)
    if folder.exists() and not force and not _ours(folder):
        others = sorted(path.name for path in folder.iterdir() if path.name not in FILES)
        what = (
            f"files of others ({', '.join(others[:3])}{', …' if len(others) > 3 else ''})" if others else "other files"
        )
        raise DemoError(
            f"{folder} holds {what}; choose another folder with --output, or write "
            f"{', '.join(FILES)} into it "
            "with --force",
            2,
        )
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise DemoError(
            f"{folder} cannot be written: {existing} is not a writable folder; choose another with --output", 2
        )


def write_all(folder: Path, contents: dict[str, bytes]) -> None:
    """Each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        try:
            write_bytes(folder / name, content)
        except OSError as error:
            raise DemoError(f"{folder / name} could not be written: {error}") from None


def _ours(folder: Path) -> bool:
    """Empty, or what an earlier demo wrote."""
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    if not names <= set(FILES) or "results.json" not in names:
        return False
    try:
        return json.loads((folder / "results.json").read_text(encoding="utf-8")).get("what") == MARK
    except (ValueError, AttributeError):
        return False
