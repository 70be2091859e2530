"""The training step of the paper's time-series models: all seeds together, against one model at a time."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import plan
from ..training import Ensemble
from .case import DTYPES
from .measure import median_and_range, reason
from .session import Measurement
from .timing import Contestant, Step, Timed, in_turns
from .training_case import TrainingCase
from .training_targets import REFERENCE

SAMPLE_SECONDS = 0.05
"""A timed sample has so many steps that it lasts this long."""

BATCHES = {"cuda": 8, "cpu": 2}
"""Different batches, taken in turns; all of them warm up."""


class _Peaked(NamedTuple):
    """Something to time, and the most bytes that were allocated for it; CUDA alone counts them."""

    timed: Timed
    peak: int | None


class TrainingBench:
    """Measures cases on one device: an `Ensemble`, and in turns with it one model as a plain loop trains it.

    That loop is torch's: the same model, autocast where the dtype is bfloat16, the recipe's optimiser. Of time series
    its softmax attention is torch's fused one, other mechanisms have the executor that is chosen for them, and
    gradients are clipped; of long sequences it is softmax with the map of every head written out, as that field's code
    has it.
    The ratio is the median of the rounds' ratios, per seed.

    Args:
        device: where to run.
        repeats: rounds per case.
        budget: seconds after which a case makes do with fewer rounds, three at least.
    """

    def __init__(self, device: torch.device, repeats: int, budget: float = 5.0) -> None:
        self.device, self.repeats, self.budget = device, repeats, budget

    def measure(self, case: TrainingCase) -> Measurement:
        """A record; where the case is refused or memory runs out, one whose `error` says why."""
        recipe, sizes = case.recipe, case.config()
        record: Measurement = asdict(case) | {
            "batch": recipe.batch_size, "length": case.length, "full_size": case.full_size, "dropout": sizes.dropout,
            "d_model": sizes.d_model, "heads": sizes.heads, "layers": sizes.layers, "error": None,
        }  # fmt: skip
        del record["steps"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length what it would rather be given
                return record | self._measure(case)
        except Exception as error:
            return record | {"error": reason(error)}
        finally:
            self._tidy()

    def _measure(self, case: TrainingCase) -> Measurement:
        data = case.data()
        record: Measurement = case.about(data) | {"executor": self._executor(case)}
        ours, rival = self._ready(self._together(case, data, record)), self._ready(self._alone(case, data))
        rounds = in_turns([ours.timed, rival.timed], self.repeats, self.budget)
        each = [(1e3 * mine / case.seeds, 1e3 * other) for mine, other in rounds]
        record |= median_and_range("ms_per_step_per_seed", [mine for mine, _ in each])
        record |= median_and_range("rival_ms_per_step_per_seed", [other for _, other in each])
        record |= median_and_range("ratio", [mine / other for mine, other in each])
        record |= {
            "steps_per_second": 1e3 / record["ms_per_step_per_seed"],
            "rival_steps_per_second": 1e3 / record["rival_ms_per_step_per_seed"],
            "peak_bytes_per_seed": ours.peak and ours.peak // case.seeds,
            "rival_peak_bytes_per_seed": rival.peak,
            "memory_ratio": ours.peak and rival.peak and ours.peak / case.seeds / rival.peak,
            "repeats": len(rounds), "steps_per_sample": ours.timed.inner,
        }  # fmt: skip
        if case.full_size and case.mechanism == "softmax" and case.dataset in REFERENCE:
            record["reference"] = REFERENCE[case.dataset]._asdict()
        return record

    def _ready(self, make: Callable[[], Contestant]) -> _Peaked:
        """Built, warmed up and with the memory of its first steps counted, beyond what was there before."""
        self._tidy()
        cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        timed = Timed(make(), "eager", self.device)
        timed.inner = math.ceil(SAMPLE_SECONDS / timed.sample())
        return _Peaked(timed, torch.cuda.max_memory_allocated() - before if cuda else None)

    def _together(self, case: TrainingCase, data: Any, record: Measurement) -> Callable[[], Contestant]:
        """All members; the record is told whether their step is a CUDA graph."""

        def make() -> Contestant:
            ensemble = Ensemble(case.task(data), case.recipe, range(case.seeds), self.device)
            batches = self._batches(case, case.seeds, len(ensemble.train))
            steps: list[Step] = [partial(ensemble.step, rows) for rows in batches]
            steps[0]()
            if not bool(ensemble.alive.all()):
                raise ArithmeticError("the loss is not finite")
            record["captured"] = ensemble.captured
            return Contestant("together", steps, 0)

        return make

    def _alone(self, case: TrainingCase, data: Any) -> Callable[[], Contestant]:
        def make() -> Contestant:
            train, series = case.rival(data, self.device), case.about(data)["series"]
            return Contestant("alone", [partial(train, rows[0]) for rows in self._batches(case, 1, series)], 0)

        return make

    def _batches(self, case: TrainingCase, members: int, series: int) -> list[Tensor]:
        """Rows [members, batch] of the training series: full batches, no series twice in one."""
        draw = torch.Generator().manual_seed(1)
        drawn = torch.rand(BATCHES[self.device.type], members, series, generator=draw).argsort(-1)
        return list(drawn[..., : case.recipe.batch_size].contiguous().to(self.device))

    def _executor(self, case: TrainingCase) -> str:
        """What runs the attention of all members, as `primaldual.plan` says it of a captured step."""
        config, primal = case.config(), case.primal
        width = config.d_model // config.heads
        made: dict[str, Any] = {"device": self.device, "dtype": DTYPES[case.dtype]}
        x = torch.zeros(case.attended, config.heads, config.length, width, **made)
        hidden = torch.zeros(len(x), config.length, dtype=torch.bool, device=self.device)
        mask = hidden if case.masked else None
        own = primal.learned(config.heads, width) | primal.features.state(width)
        with torch.cuda.stream(torch.cuda.Stream()) if self.device.type == "cuda" else nullcontext():
            return plan(
                x.requires_grad_(), x, x, primal, key_padding_mask=mask, query_padding_mask=mask, left_padding=False,
                dropout_p=config.dropout if config.attention_dropout is None else config.attention_dropout,
                impl=case.impl, parameters={name: p.to(**made) for name, p in own.items()},
            ).impl  # fmt: skip

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
