"""What a run leaves behind: hardware, versions, ceilings and records, as JSON without a machine's paths."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..ops.gpu import native

_PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@-]+){2,}")


def environment(device: torch.device, command: str) -> dict[str, Any]:
    """What the figures depend on."""
    found: dict[str, Any] = {
        "primaldual": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "compiled": device.type == "cuda" and native.library() is not None,
        "threads": torch.get_num_threads(),
        "command": command,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
            "memory_bytes": properties.total_memory,
            "cache_bytes": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def device_name(device: torch.device) -> str:
    """The GPU, or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def slug(device: torch.device) -> str:
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


def write(path: Path, content: dict[str, Any]) -> None:
    """The whole file, or the one that was there before."""
    write_bytes(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write`, of bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip().splitlines()[0] if said.strip() else None
