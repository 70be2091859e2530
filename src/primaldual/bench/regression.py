"""A layer's worth of regressions, all at once, against a loop over scikit-learn's SVR, one output after the other."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from ..base.packages import needed
from ..base.terminal import titled
from ..regression import NotConvergedWarning, fit
from .measure import median_and_range
from .session import Content, Measurement
from .table import two_digits

LEGEND = """The kernel is of order 1/N², so C = N and C = N² leave points free. Both are compared at the same duality
gap: the one that scikit-learn's default tolerance gives, measured first; ours is then asked for that gap. The loop's
time is that of a sample of the outputs, scaled to all of them."""


@dataclass(frozen=True)
class RegressionCase:
    """Random keys and targets of some heads; `must` bounds the ratio of the times."""

    name: str
    head_dim: int
    C: float
    must: float | None = None
    heads: int = 8
    outputs: int = 64
    length: int = 512
    epsilon: float = 0.05


CASES = (
    RegressionCase("C = N", 64, 512.0, 0.25),
    RegressionCase("C = N²", 64, 512.0**2, 0.25),
    RegressionCase("C = N²", 16, 512.0**2),
)


class RegressionBench:
    """Measures cases.

    Args:
        device: where ours runs; scikit-learn runs on the CPU.
        repeats: rounds of ours.
        sample: outputs per head that scikit-learn is timed on.
    """

    def __init__(self, device: torch.device, repeats: int = 3, sample: int = 4) -> None:
        self.device, self.repeats, self.sample = device, repeats, sample
        self._svr: Any = needed("sklearn.svm", "sklearn", "the rival of this benchmark", "scikit-learn").SVR

    def measure(self, case: RegressionCase) -> Measurement:
        """Both on the same problems, to the same gap."""
        draw = torch.Generator().manual_seed(0)
        keys, targets = (
            torch.randn(case.heads, case.length, width, generator=draw, dtype=torch.float64)
            for width in (case.head_dim, case.outputs)
        )
        loop, gap = self._loop(case, keys, targets)
        keys, targets = keys.to(self.device), targets.to(self.device)
        times = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConvergedWarning)
            for _ in range(self.repeats):
                start = self._now()
                solved = fit("softmax", keys, targets, C=case.C, epsilon=case.epsilon, bias=True, tol=gap)
                times.append(self._now() - start)
        ratios = [each / loop for each in times]
        return asdict(case) | median_and_range("seconds", times) | median_and_range("ratio", ratios) | {
            "loop_seconds": loop, "gap": float(solved.certificate.gap.max()), "loop_gap": gap,
            "iterations": solved.iterations, "repeats": self.repeats, "sample": self.sample,
        }  # fmt: skip

    def _loop(self, case: RegressionCase, keys: Tensor, targets: Tensor) -> tuple[float, float]:
        """Seconds of scikit-learn for all outputs, and the median of its duality gaps."""
        scores = keys @ keys.mT / case.head_dim**0.5
        log_h = scores.logsumexp(-1)
        seconds, gaps = [], []
        for kernel, y in zip((scores - log_h[..., None] - log_h[..., None, :]).exp().numpy(), targets, strict=True):
            for output in y.T[: self.sample].numpy():
                start = time.perf_counter()
                found = self._svr(kernel="precomputed", C=case.C, epsilon=case.epsilon).fit(kernel, output)
                seconds.append(time.perf_counter() - start)
                beta = np.zeros(case.length)
                beta[found.support_] = found.dual_coef_[0]
                gaps.append(relative_gap(kernel, output, beta, float(found.intercept_[0]), case.C, case.epsilon))
        return fmean(seconds) * case.heads * case.outputs, median(gaps)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def relative_gap(
    kernel: np.ndarray, y: np.ndarray, beta: np.ndarray, bias: float, c: float, epsilon: float
) -> float:  # fmt: skip
    """The certificate's gap, in its units: K scaled to a largest diagonal entry of 1."""
    scale = kernel.diagonal().max()
    kernel, beta, c = kernel / scale, beta * scale, c * scale
    f = kernel @ beta
    primal = beta @ f / 2 + c * np.clip(np.abs(y - f - bias) - epsilon, 0, None).sum()
    dual = y @ beta - epsilon * np.abs(beta).sum() - beta @ f / 2
    return float(abs(primal - dual) / (1 + abs(primal) + abs(dual)))


def verdicts(content: Content) -> Content:
    """Each case with a bound: its ratio beside it."""
    return {
        "targets": [
            {"name": r["name"], "value": r["ratio"], "must": r["must"], "met": r["ratio"] <= r["must"], "record": place}
            for place, r in enumerate(content["records"])
            if r["must"] is not None
        ]
    }


def results_table(content: Content) -> Table:
    """A line per case."""
    first = content["records"][0]
    table = titled(
        f"{first['heads']} heads × {first['outputs']} outputs, N = {first['length']}, ε {first['epsilon']:g}"
    )
    table.add_column("case", style="bold cyan", no_wrap=True)
    for heading in ("head dim", "ours, s", "loop, s", "ratio", "must", "gap", "loop's gap"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in content["records"]:
        cells = [r["name"], str(r["head_dim"]), two_digits(r["seconds"]), two_digits(r["loop_seconds"])]
        bound = "" if r["must"] is None else f"≤ {r['must']:g}"
        table.add_row(*cells, f"[bold]{two_digits(r['ratio'])}[/]", bound, f"{r['gap']:.1e}", f"{r['loop_gap']:.1e}")
    return table
