"""What figures depend on: versions, hardware and the commit, without a path of this machine."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .version import __version__

_PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@-]+){2,}")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware; of a GPU its driver and sizes, too."""
    found: dict[str, Any] = {
        "primaldual": __version__, "commit": commit(), "torch": torch.__version__, "triton": version("triton"),
        "python": platform.python_version(), "system": system(), "device": device_name(device),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver(),
            "memory_bytes": properties.total_memory, "cache_bytes": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
        }  # fmt: skip
    return found


def version(package: str) -> str | None:
    """Of an installed package; None where it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def system() -> str:
    """Such as "Linux x86_64"."""
    return f"{platform.system()} {platform.machine()}"


def commit() -> str | None:
    """Of the checkout that this code runs from, with "+" where files differ from it; None for an installed copy."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    revision = _output_of("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _output_of("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return revision and revision + ("+" if changed else "")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """The GPU, or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def folder_name(device: torch.device) -> str:
    """The folder of this device's results: "cpu", or the GPU's name, such as "h200"."""
    if device.type != "cuda":
        return "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return name.removeprefix("nvidia-").removeprefix("geforce-")


def without_paths(text: str) -> str:
    """One line of at most 200 characters, with no path of this machine.

    >>> without_paths("cannot open /home/me/x.so: no such file")
    'cannot open …: no such file'
    """
    lines = text.strip().splitlines() or [""]
    return _PATH.sub("…", lines[0])[:200]


def _driver() -> str | None:
    text = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else None


@functools.cache
def _output_of(program: str, *arguments: str) -> str | None:
    """What a program prints, asked once; None where it is not there, or fails."""
    if (found := shutil.which(program)) is None:
        return None
    try:
        done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
