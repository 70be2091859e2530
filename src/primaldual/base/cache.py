"""Where what is prepared once is kept: data sets, and what was compiled."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_directory(directory: str | Path | None = None) -> Path:
    """The directory given, else that of `PRIMALDUAL_CACHE`, else the user's cache."""
    if chosen := directory or os.environ.get("PRIMALDUAL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Caches"
    else:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "primaldual"
