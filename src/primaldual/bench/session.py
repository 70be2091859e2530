"""Measure case after case, and keep the file of what was measured up to date."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..base.environment import environment
from ..base.files import write_json
from ..kernels.native import library as native

T = TypeVar("T")
Measurement = dict[str, Any]
Content = dict[str, Any]


def conditions(device: torch.device, command: str) -> dict[str, Any]:
    """What the figures depend on: the environment, whether the compiled part is used, and the command."""
    compiled = device.type == "cuda" and native.library() is not None
    return environment(device) | {"compiled": compiled, "command": command}


def measure_all(
    cases: Sequence[T],
    measure: Callable[[T], Measurement],
    path: Path,
    about: dict[str, Any],
    *,
    before: Callable[[T | None], None] = lambda case: None,
    first: Callable[[], Content] = dict,
    summary: Callable[[Content], Content] = lambda content: {},
) -> Content:
    """What is written to `path`: `about`, what `first` measures, records, and what `summary` makes of them.

    The file is written after every case, and holds what there is when the run is interrupted (`complete` is False).

    Args:
        before: called before every case; with None before `first`.
    """
    start = time.perf_counter()
    content: Content = {"complete": False, "environment": about, "records": []}

    def save() -> None:
        content["wall_seconds"] = round(time.perf_counter() - start, 1)
        content.update(summary(content))
        write_json(path, content)

    try:
        before(None)
        content |= first()
        for case in cases:
            before(case)
            content["records"].append(measure(case))
            save()
        content["complete"] = True
    except KeyboardInterrupt:
        pass
    save()
    return content
