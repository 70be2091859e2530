"""A layer's worth of regressions against a loop over scikit-learn's SVR, as a ratio in one run.

    python benchmarks/regression.py [--device cpu|cuda] [--sample 8] [--output results/cpu/regression.json]

8 heads × 64 outputs, N = 512, ε = 0.05. The kernel is of order 1/N², so C = N and C = N² leave points free. Both are
compared at the same duality gap: the one that scikit-learn's default tolerance gives, measured first; ours is then
asked for that gap. scikit-learn solves one output at a time; `--sample` outputs of every head are timed, and the time
of the loop is that times 64 over the sample.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.svm import SVR

from primaldual.regression import NotConvergedWarning, fit

HEADS, OUTPUTS, LENGTH, EPSILON = 8, 64, 512, 0.05
CASES = [
    ("C = N", 64, float(LENGTH), 0.25),
    ("C = N²", 64, float(LENGTH**2), 0.25),
    ("C = N², head dim 16", 16, float(LENGTH**2), None),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where ours runs")
    parser.add_argument("--sample", type=int, default=4, help="outputs per head that scikit-learn is timed on")
    parser.add_argument("--output", type=Path, help="write the measurements to this JSON file")
    arguments = parser.parse_args()
    records = [measure(*case, arguments.device, arguments.sample) for case in CASES]
    print(f"{'case':22}{'ours, s':>10}{'loop, s':>10}{'ratio':>9}{'must reach':>12}{'gap, ours':>12}{'gap, loop':>12}")
    for r in records:
        bound = "" if r["must_reach"] is None else f"{r['must_reach']:.2f}"
        print(f"{r['case']:22}{r['seconds']:>10.2f}{r['loop_seconds']:>10.1f}{r['ratio']:>9.3f}{bound:>12}"
              f"{r['gap']:>12.1e}{r['loop_gap']:>12.1e}")  # fmt: skip
    if arguments.output:
        environment = {
            "torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine(),
            "command": f"python benchmarks/regression.py --device {arguments.device} --sample {arguments.sample}",
        }  # fmt: skip
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"environment": environment, "measurements": records}, indent=1) + "\n")


def measure(case: str, head_dim: int, c: float, must_reach: float | None, device: str, sample: int) -> dict:
    """Time both on the same problems, to the same gap."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(HEADS, LENGTH, head_dim, generator=generator, dtype=torch.float64)
    targets = torch.randn(HEADS, LENGTH, OUTPUTS, generator=generator, dtype=torch.float64)
    scores = keys @ keys.transpose(-1, -2) / head_dim**0.5
    log_h = scores.logsumexp(-1)
    kernels = (scores - log_h.unsqueeze(-1) - log_h.unsqueeze(-2)).exp().numpy()
    seconds, gaps = 0.0, []
    for head in range(HEADS):
        for output in range(sample):
            y = targets[head, :, output].numpy()
            start = time.perf_counter()
            other = SVR(kernel="precomputed", C=c, epsilon=EPSILON).fit(kernels[head], y)
            seconds += time.perf_counter() - start
            beta = np.zeros(LENGTH)
            beta[other.support_] = other.dual_coef_[0]
            gaps.append(relative_gap(kernels[head], y, beta, float(other.intercept_[0]), c))
    loop, loop_gap = seconds * OUTPUTS / sample, float(np.median(gaps))
    keys, targets = keys.to(device), targets.to(device)
    times = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        for _ in range(3):
            synchronize(device)
            start = time.perf_counter()
            solved = fit("softmax", keys, targets, C=c, epsilon=EPSILON, bias=True, tol=loop_gap)
            synchronize(device)
            times.append(time.perf_counter() - start)
    ours = sorted(times)[1]
    return {
        "case": case, "heads": HEADS, "outputs": OUTPUTS, "length": LENGTH, "head_dim": head_dim, "C": c,
        "epsilon": EPSILON, "seconds": ours, "loop_seconds": loop, "ratio": ours / loop, "must_reach": must_reach,
        "gap": float(solved.certificate.gap.max()), "loop_gap": loop_gap, "iterations": solved.iterations,
        "sample": sample,
    }  # fmt: skip


def relative_gap(kernel: np.ndarray, y: np.ndarray, beta: np.ndarray, bias: float, c: float) -> float:
    """The certificate's gap, in its units: K scaled to a largest diagonal entry of 1."""
    scale = kernel.diagonal().max()
    kernel, beta, c = kernel / scale, beta * scale, c * scale
    f = kernel @ beta
    primal = beta @ f / 2 + c * np.clip(np.abs(y - f - bias) - EPSILON, 0, None).sum()
    dual = y @ beta - EPSILON * np.abs(beta).sum() - beta @ f / 2
    return abs(primal - dual) / (1 + abs(primal) + abs(dual))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
