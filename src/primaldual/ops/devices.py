"""What was measured on a device: how fast it is, and what each executor makes of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..kernels.launching import relative_size


class Efficiency(NamedTuple):
    """How an executor uses a device. Host seconds are those of forward and backward."""

    share: float  # of the device's FLOPs per second
    row: int = 0  # keys whose time a row of queries costs beside its own
    narrowest: int = 0  # narrower heads cost as much as these
    call: float = 0.0  # host seconds beside the launches, once
    part: float = 0.0  # and for each group of heads or piece of a pattern, where there are several ways to go
    dropout: float = 1.0  # how much longer it takes where weights are dropped
    pattern: float = 1.0  # and where it computes every score to keep those of a pattern
    causal: float = 1.0  # and where scaled heads are causal, but for the scores that are left out
    forward: float = 0.0  # the share in inference, where that is another
    bandwidth: float = 1.0  # share of the device's, where every operator writes what the next one reads


class Device(NamedTuple):
    """What was measured on a device; `efficiencies` by executor.

    "masked": sdpa with a mask that is stored. "pieces": block_sparse without FlexAttention. "compiled": ragged with
    what `primaldual build` makes.
    """

    name: str
    bandwidth: float  # bytes per second
    gap: float  # device seconds between two launches
    host: float  # host seconds per launch; 0: the host is the device
    rates: Mapping[torch.dtype, float]  # FLOPs per second of long attention at head dimension 64
    efficiencies: Mapping[str, Efficiency]


H200 = Device(
    name="an H200",
    bandwidth=3.5e12,  # linear attention, 65536 × 64
    gap=2e-6,  # inside a CUDA graph, softmax at 128 and scaled heads by sdpa
    host=10e-6,
    # bfloat16: cuDNN, forward and backward, 16384 × 64; float32 and float64 were not measured
    rates={torch.bfloat16: 437e12, torch.float16: 437e12, torch.float32: 30e12, torch.float64: 10e12},
    efficiencies={
        "linear": Efficiency(1.0, call=150e-6),  # not measured beyond the bandwidth
        "block_sparse": Efficiency(0.45, narrowest=56, part=1.6e-3),  # FlexAttention, 16384, batch 2, eager
        "pieces": Efficiency(0.45, part=1.6e-3),  # in plain torch, with dropout: 93 steps, batch 320, captured
        # cuDNN; long scaled heads on streams beside ours; dropout: 1152, batch 80, and 1000, batch 320
        "sdpa": Efficiency(1.0, row=220, narrowest=56, call=150e-6, part=540e-6, dropout=1.43),
        # causal: 4096 and 16384, scaled heads, 830 and 2545 µs
        "mixed": Efficiency(1.0, row=220, narrowest=56, call=150e-6, part=540e-6, causal=1.22),
        # a pattern's mask at 4096, batch 4
        "masked": Efficiency(0.30, row=220, narrowest=56, call=150e-6, part=540e-6),
        # a pattern: 896 × 16 and 1152 × 64, with dropout, 1.11 to 1.28
        # inference: 4096 and 16384, scaled heads, 328 and 2286 µs; causal: 1024, 4096 and 16384, 438, 951 and 2954 µs,
        # the last two before what sees most went first
        "ragged": Efficiency(
            0.95, row=200, narrowest=36, call=560e-6, dropout=1.18, pattern=1.25, forward=1.05, causal=1.4
        ),
        # 128 and 1024, eager
        "compiled": Efficiency(0.95, row=200, narrowest=36, call=220e-6, dropout=1.18, forward=1.05, causal=1.4),
        "dense": Efficiency(0.30, call=150e-6, part=540e-6),  # not measured
        "reference": Efficiency(0.30, call=150e-6),  # not measured
        "product": Efficiency(1.6),  # a layer's projections at 4096, batch 8, 512 wide
    },
)
"""torch 2.11, captured and eager, forward and backward. Other GPUs: the same constants, and rates by their size."""

CPU = Device(
    name="a CPU",
    bandwidth=5e10,  # not measured
    gap=0.0,
    host=0.0,
    rates={torch.float32: 1.2e11, torch.float64: 6e10, torch.bfloat16: 1.2e11, torch.float16: 6e10},
    efficiencies={
        "linear": Efficiency(0.125),
        "block_sparse": Efficiency(0.20),  # pieces pay when they hold at most one key in five
        "pieces": Efficiency(0.20),
        "sdpa": Efficiency(1.0),
        "mixed": Efficiency(1e-6),  # not there
        "masked": Efficiency(1.0),
        "ragged": Efficiency(1e-6),  # Triton's interpreter, for tests
        "compiled": Efficiency(1e-6),
        "dense": Efficiency(0.6, bandwidth=0.15),  # 256 and 1024, with weights and without, within a factor of 3
        "reference": Efficiency(0.5, bandwidth=0.15),
        "product": Efficiency(1.0),
    },
)
"""Two cores, results/cpu/attention.json. An operator's own overhead is part of the rates."""


def device_of(device: torch.device) -> Device:
    """The constants of a device; a compiler, which cannot look at one, takes the H200 for any GPU."""
    if device.type != "cuda":
        return CPU
    if torch.compiler.is_compiling():
        return H200
    name, size = torch.cuda.get_device_name(device), relative_size(device)
    if "H200" in name and size == 1.0:
        return H200
    rates = {dtype: rate * size for dtype, rate in H200.rates.items()}
    return H200._replace(name=f"{name} (by the constants of an H200)", rates=rates)
