"""Attention forward + backward on this machine, as ratios to torch's fused softmax attention in the same run.

    python benchmarks/attention_cpu.py [--output results/cpu/attention.json] [--repeats 7]

Count first: at length N, head dimension D, one head's scores and sums take 4·N·W·D FLOPs forward and 2.5 times that
backward, W its number of keys. Predicted ratios: bn 1 (one pass over q and one over k beside N² work), sh with scales
1,1,2,2,4,4,8,8 (1 + 1/2 + 1/4 + 1/8)/4 = 0.47, linear 2·D_φ/N plus feature maps, which is far below 0.05.

The rival and the mechanism run in turns, so that a busy machine slows both; the figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from primaldual import attention, derive, mechanism

CASES = [
    # name, mechanism, batch, length, the ratio it must reach
    ("bn", mechanism("bn"), 4, 2048, 1.10),
    ("sh", mechanism("sh", scales=(1, 1, 2, 2, 4, 4, 8, 8)), 4, 2048, 0.60),
    ("bn+sh", mechanism("bn+sh", scales=(1, 1, 2, 2, 4, 4, 8, 8)), 4, 2048, None),
    ("sparse", mechanism("sparse", stride="sqrt"), 4, 2048, None),
    ("linear", mechanism("linear"), 1, 16384, 0.05),
    ("linear, causal", mechanism("linear"), 1, 16384, None),
]
HEADS, HEAD_DIM = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the measurements to this JSON file")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of runs per case (median is reported)")
    arguments = parser.parse_args()
    records = [measure(*case, repeats=arguments.repeats) for case in CASES]
    print(f"{'mechanism':16}{'length':>8}{'ratio':>8}{'spread':>16}{'must reach':>12}{'FLOPs ratio':>13}")
    for r in records:
        spread = f"{r['ratio_min']:.3f}–{r['ratio_max']:.3f}"
        bound = "" if r["must_reach"] is None else f"{r['must_reach']:.2f}"
        print(f"{r['name']:16}{r['length']:>8}{r['ratio']:>8.3f}{spread:>16}{bound:>12}{r['flops_ratio']:>13.3f}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": environment(arguments.repeats), "measurements": records}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    if any(r["must_reach"] is not None and r["ratio"] > r["must_reach"] for r in records):
        sys.exit("a ratio is over what it must reach")


def measure(name: str, primal, batch: int, length: int, must_reach: float | None, repeats: int) -> dict:
    """Forward + backward of the mechanism over that of fused softmax on the same tensors."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    up = torch.randn(batch, HEADS, length, HEAD_DIM)
    causal = "causal" in name

    def rival() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def ours() -> Tensor:
        return attention(q, k, v, primal, is_causal=causal)

    for warm in (rival, ours):
        step(warm, up, (q, k, v))
    pairs = [(step(ours, up, (q, k, v)), step(rival, up, (q, k, v))) for _ in range(repeats)]
    ratios = [a / b for a, b in pairs]
    shape = {"queries": length, "keys": length, "heads": HEADS, "head_dim": HEAD_DIM}
    flops = [derive(p).cost(**shape).attention for p in (primal, "softmax")]
    return {
        "name": name, "primal": primal.to_dict(), "batch": batch, "length": length, "heads": HEADS,
        "head_dim": HEAD_DIM, "dtype": "float32", "ratio": statistics.median(ratios), "ratio_min": min(ratios),
        "ratio_max": max(ratios), "seconds": statistics.median(a for a, _ in pairs),
        "softmax_seconds": statistics.median(b for _, b in pairs), "flops_ratio": flops[0] / flops[1],
        "must_reach": must_reach,
    }  # fmt: skip


def step(run: Callable[[], Tensor], up: Tensor, inputs: tuple[Tensor, ...]) -> float:
    """Seconds of one forward and backward pass."""
    start = time.perf_counter()
    torch.autograd.grad(run(), inputs, up)
    return time.perf_counter() - start


def environment(repeats: int) -> dict[str, object]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "command": f"python benchmarks/attention_cpu.py --repeats {repeats}",
    }


if __name__ == "__main__":
    main()
