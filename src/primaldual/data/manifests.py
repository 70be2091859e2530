"""The manifest of a prepared folder: what it is, and which version of the library wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cache import CacheError

MANIFEST = "manifest.json"


def read_manifest(folder: Path, version: int) -> dict[str, Any]:
    """What a folder says of itself; a `CacheError` where that is damaged or of another version."""
    try:
        about = json.loads((folder / MANIFEST).read_text("utf-8"))
        found = about["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheError(f"{folder} is damaged ({type(error).__name__}: {error})") from None
    if found != version:
        raise CacheError(f"{folder} was prepared by version {found}; this one is {version}")
    return dict(about)
