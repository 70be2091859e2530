"""From a cell of the grid to a record: what is counted, and what was measured."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from ..measure import reason
from ..session import Measurement
from .flops import flops
from .memory import peak
from .setting import ATTENTIONS, MECHANISMS, STEPS, DeviceKind, Setting
from .speed import speed
from .step import ModelStep, counted_by_torch

TOKENS = {"cuda": 2 * 32 * 4096, "cpu": 2 * 512}
"""Of a step that is timed: on a GPU those of the task's own batch, 32 pairs of 4096; a pair at least."""


@dataclass(frozen=True)
class Cell:
    """One record: a setting, with all mechanisms.

    Args:
        subject: "cost" (FLOPs and memory) or "speed".
        setting: the setting.
        measured: whether memory is measured, and of materialised scores FLOPs.
    """

    subject: Literal["cost", "speed"]
    setting: Setting
    measured: bool


def cells(
    dimensions: Iterable[int], lengths: Iterable[int], timed: Iterable[int], *, pairs: int, device: DeviceKind,
    counted_only: bool = False,
) -> list[Cell]:  # fmt: skip
    """The grid: FLOPs and memory of every size, then speed; of what is fused at `timed` dimensions, others count."""
    timed, lengths = tuple(timed), tuple(lengths)
    found = []
    for attention, step, dimension, length in product(ATTENTIONS, STEPS, dimensions, lengths):
        setting = Setting(dimension, length, pairs, step, attention, device)
        measured = not counted_only and (dimension in timed or not setting.fused)
        found.append(Cell("cost", setting, measured))
    if counted_only:
        return found
    for step, dimension, length in product(STEPS, timed, lengths):
        many = max(1, TOKENS[device] // (2 * length))
        found.append(Cell("speed", Setting(dimension, length, many, step, "fused", device), True))
    return found


class EfficiencyBench:
    """Measures cells on one device.

    Args:
        device: where to run.
        repeats: rounds of what is timed.
        budget: seconds after which a cell makes do with fewer rounds, three at least.
    """

    def __init__(self, device: torch.device, repeats: int, budget: float) -> None:
        self.device, self.repeats, self.budget = device, repeats, budget

    def measure(self, cell: Cell) -> Measurement:
        """A record; of a mechanism that was refused or did not fit in memory its `error` says why."""
        setting = cell.setting
        record: Measurement = {
            "subject": cell.subject, "attention": setting.attention, "step": setting.step,
            "dimension": setting.dimension, "length": setting.length, "pairs": setting.pairs,
            "dtype": str(setting.dtype).removeprefix("torch."), "dropout": setting.dropped,
            "weights_dropout": setting.weights_dropped,
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at length what it would rather be given
            if cell.subject == "speed":
                self._tidy()
                found = speed(MECHANISMS, setting, self.device, self.repeats, self.budget)
            else:
                found = dict(self._costs(cell))
        return record | {"mechanisms": found}

    def _costs(self, cell: Cell) -> Iterator[tuple[str, Measurement]]:
        setting = cell.setting
        for name in MECHANISMS:
            most = peak(name, setting)
            record: Measurement = {"flops": flops(name, setting).total, "bytes": most.bytes, "at": most.at}
            if cell.measured:
                try:
                    if not setting.fused:  # of a fused attention torch's counter does not see what it does
                        record["measured_flops"] = counted_by_torch(name, setting)
                    record["measured_bytes"] = ModelStep(name, setting, self.device).peak()
                except Exception as error:
                    record["error"] = reason(error)
                    self._tidy()
            yield name, record

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
