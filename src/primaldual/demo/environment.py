"""Where the numbers come from: versions, hardware, and how busy the machine was."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from .pool import cores


def environment() -> dict[str, str | int]:
    """Taken when the demo starts."""
    packages = ("primaldual", "torch", "aeon", "matplotlib", "numpy")
    versions = [f"{package} {metadata.version(package)}" for package in packages]
    return {
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "hardware": f"{_processor()}, {cores()} cores, {platform.system()} {platform.machine()}",
        "load before": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"
