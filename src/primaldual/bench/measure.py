"""From a case to a record: time, rates as shares of the ceilings, peak memory, and the ratio to the best rival."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from ..base.environment import without_paths
from . import kernels, layers
from .case import Case
from .ceilings import Ceilings, measure_ceilings, tf32
from .counts import bytes_moved, flops
from .session import Measurement
from .timing import Contestant, Timed, in_turns, working_bytes
from .workload import Workload

PROBES = 5


class AttentionBench:
    """Measures cases on one device, against ceilings that are measured in the same run.

    The rival is the fastest fused softmax for the same shape, dtype, step and mode: eager is compared with eager,
    captured with captured. Ours and the rival run in turns; the ratio is the median of the rounds' ratios.

    Peak memory is that of one eager step: its inputs and parameters, and the most that it allocates beyond them
    (what is saved for backward, gradients, outputs, workspaces of the step), whatever else the process holds.

    Args:
        device: where to run.
        repeats: rounds per case.
        budget: seconds after which a case makes do with fewer rounds, three at least.
    """

    def __init__(self, device: torch.device, repeats: int, budget: float = 3.0) -> None:
        self.device, self.repeats, self.budget = device, repeats, budget
        self.ceilings: Ceilings | None = None
        self._probed: dict[Case, dict[str, float | str]] = {}
        self._materialised: dict[Case, int | None] = {}

    def find_ceilings(self, cases: list[Case]) -> Measurement:
        """Of a copy, and of matrix products in the dtypes of the cases."""
        self.ceilings = measure_ceilings((case.arithmetic for case in cases), self.device)
        return {"ceilings": self.ceilings._asdict()}

    def measure(self, case: Case) -> Measurement:
        """A record; where the case is refused or memory runs out, one whose `error` says why."""
        record: Measurement = asdict(case) | {"error": None}
        try:
            with warnings.catch_warnings(), tf32_where_asked(case):
                warnings.simplefilter("ignore")  # torch says at length why a back end refuses
                return record | self._measure(case)
        except Exception as error:
            return record | {"error": reason(error)}
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _measure(self, case: Case) -> Measurement:
        workload = (kernels if case.subject == "kernels" else layers).workload(case, self.device)
        memory = self._memory(case, workload)
        ours = Timed(workload.ours, case.mode, self.device)
        rivals = self._probe(case, workload)
        times = {name: found for name, found in rivals.items() if isinstance(found, float)}
        fastest = min(times, key=times.__getitem__, default=None)
        record: Measurement = {"executor": workload.executor, "input_sets": workload.input_sets,
                          "inputs_fit_in_cache": workload.in_cache, "rival": fastest, "rivals": rivals}  # fmt: skip
        if fastest is None:
            rounds = in_turns([ours], self.repeats, self.budget)
        else:
            rival = next(one for one in workload.rivals if one.name == fastest)
            rounds = in_turns([ours, Timed(rival, case.mode, self.device)], self.repeats, self.budget)
            record |= median_and_range("rival_seconds", [times[1] for times in rounds])
            record |= median_and_range("ratio", [times[0] / times[1] for times in rounds])
            record |= {"rival_peak_bytes": self._peak(rival)}
        record |= median_and_range("seconds", [times[0] for times in rounds])
        record |= {"repeats": len(rounds), "steps_per_sample": ours.inner} | memory
        if (peak := memory["peak_bytes"]) and (other := record.get("rival_peak_bytes")):
            record["memory_ratio"] = peak / other
        return record | self._rates(case, record["seconds"])

    def _probe(self, case: Case, workload: Workload) -> dict[str, float | str]:
        """Seconds of every fused softmax, or why it refuses; once per shape."""
        key = case.softmax
        if key not in self._probed:
            found: dict[str, float | str] = {}
            probes = PROBES if len(workload.rivals) > 1 else 1
            for rival in workload.rivals:
                try:
                    timed = Timed(rival, case.mode, self.device)
                    found[rival.name] = statistics.median(timed.sample() for _ in range(probes))
                except (RuntimeError, NotImplementedError) as error:
                    found[rival.name] = reason(error)
            self._probed[key] = found
        return self._probed[key]

    def _memory(self, case: Case, workload: Workload) -> Measurement:
        """Ours, and softmax with its weights in memory where the workload has it; the latter once per shape."""
        found: Measurement = {"peak_bytes": self._peak(workload.ours)}
        if workload.materialised is None or self.device.type != "cuda":
            return found
        key = case.softmax
        if key not in self._materialised:
            try:
                self._materialised[key] = self._peak(workload.materialised)
            except torch.OutOfMemoryError:
                self._materialised[key] = None
                torch.cuda.empty_cache()
        dense = self._materialised[key]
        return found | {
            "materialised_peak_bytes": dense,
            "memory_ratio_materialised": dense and found["peak_bytes"] / dense,
        }

    def _peak(self, contestant: Contestant) -> int | None:
        working = working_bytes(contestant, self.device)
        return None if working is None else contestant.held + working

    def _rates(self, case: Case, seconds: float) -> Measurement:
        work, moved = flops(case), bytes_moved(case)
        rival_work = flops(case.softmax)
        found: Measurement = {
            "flops": work, "bytes": moved, "bytes_per_second": moved / seconds,
            "flops_per_second": work and work / seconds,
            "arithmetic_limit": work and rival_work and work / rival_work,
        }  # fmt: skip
        if self.ceilings is not None:
            found["bytes_share"] = found["bytes_per_second"] / self.ceilings.bytes_per_second
            if work:
                found["flops_share"] = found["flops_per_second"] / self.ceilings.flops_per_second[case.arithmetic]
        return found


@contextmanager
def tf32_where_asked(case: Case) -> Iterator[None]:
    """tf32 for ours and its rival alike, in float32 cases that ask for it."""
    if case.arithmetic != "tf32":
        yield
        return
    with tf32(True):
        yield


def median_and_range(name: str, values: list[float]) -> Measurement:
    """The median of a figure, and its range."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def reason(error: Exception) -> str:
    """Why a case could not be measured, in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    said = str(error) if isinstance(error, (ValueError, MemoryError)) else f"{type(error).__name__}: {error}"
    return without_paths(said)
