"""Measure case after case, and keep the file of what was measured up to date."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..base.environment import environment
from ..base.files import write_json
from ..kernels.native import library as native
from .case import Case
from .measure import Bench, Record

Summary = Callable[[Sequence[tuple[Case, Record]]], dict[str, Any]]


def conditions(device: torch.device, command: str) -> dict[str, Any]:
    """What the figures depend on: the environment, whether the compiled part is used, and the command."""
    compiled = device.type == "cuda" and native.library() is not None
    return environment(device) | {"compiled": compiled, "command": command}


def run(
    bench: Bench,
    cases: Sequence[Case],
    path: Path,
    about: dict[str, Any],
    before: Callable[[Case | None], None] = lambda case: None,
    summary: Summary = lambda done: {},
) -> dict[str, Any]:
    """What is written to `path`: `about`, ceilings, records, and what `summary` makes of them.

    The file is written after every case, and holds what there is when the run is interrupted (`complete` is False).

    Args:
        before: called before every case; with None before the ceilings are measured.
    """
    start = time.perf_counter()
    done: list[tuple[Case, Record]] = []
    content: dict[str, Any] = {"complete": False, "environment": about, "ceilings": None}

    def save() -> None:
        content["wall_seconds"] = round(time.perf_counter() - start, 1)
        content["records"] = [record for _, record in done]
        write_json(path, content | summary(done))

    try:
        before(None)
        content["ceilings"] = bench.find_ceilings(list(cases))._asdict()
        for case in cases:
            before(case)
            done.append((case, bench.measure(case)))
            save()
        content["complete"] = True
    except KeyboardInterrupt:
        pass
    save()
    return content | summary(done)
