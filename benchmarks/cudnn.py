"""What docs/kernels.md says of cuDNN's attention, measured again; needs a CUDA device.

    python benchmarks/cudnn.py half      # which numbers of keys give NaN in gradients where scores are far below zero
    python benchmarks/cudnn.py streams   # scaled heads, one call per scale on streams, with nothing around the calls

`half`: every query has scores near −250. `streams`: keys and values of every scale are given, nothing is pooled, copied
or joined; captured in a CUDA graph, as ratios to one call with all heads at full length. It is what remains of scaled
heads by cuDNN when all else is free. Scales 1,1,2,2,4,4,8,8; bfloat16, head dimension 64.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as fused

from primaldual.bench.timing import elapsed
from primaldual.training.capture import step_graph

CUDA = torch.device("cuda")
KEYS = (1, 17, 32, 63, 64, 65, 96, 112, 127, 128, 129, 192, 224, 256, 320, 448, 576, 640, 896, 1000, 1152, 1751)
OTHERS = ({}, {"is_causal": True}, {"dropout_p": 0.1})


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True)


def half() -> None:
    for dim in (16, 64, 128):
        for back_end in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            wrong, refused = set(), set()
            for keys in KEYS:
                for others in OTHERS:
                    try:
                        if not finite(keys, dim, back_end, others):
                            wrong.add(keys)
                    except RuntimeError:  # this back end does not take it
                        refused.add(keys)
            name = back_end.name.removesuffix("_ATTENTION").lower()
            print(f"head dimension {dim}, {name}: NaN at {sorted(wrong) or 'none'}; refused some of {sorted(refused)}")


def finite(keys: int, dim: int, back_end: SDPBackend, others: dict[str, object]) -> bool:
    far = (250 / dim**0.5) ** 0.5
    q, k, v = draw(2, 2, 256, dim), draw(2, 2, keys, dim), draw(2, 2, keys, dim)
    with torch.no_grad():
        q.mul_(0.01).add_(far)
        k.mul_(0.01).sub_(far)
    with sdpa_kernel(back_end):
        out = fused(q, k, v, **others)  # type: ignore[arg-type]
        found = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    return all(bool(x.isfinite().all()) for x in (out, *found))


def streams() -> None:
    for length, batch in ((1024, 8), (4096, 8), (16384, 4)):
        whole = [draw(batch, 8, length, 64) for _ in range(3)]
        parts = [[draw(batch, 2, n, 64) for n in (length, length // s, length // s)] for s in (1, 2, 4, 8)]
        side = [torch.cuda.Stream() for _ in parts]

        def together(parts: list[list[Tensor]] = parts, side: list[torch.cuda.Stream] = side) -> list[object]:
            current, found = torch.cuda.current_stream(), []
            for part, stream in zip(parts, side, strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    found.append(step(part))
            for stream in side:
                current.wait_stream(stream)
            return found

        ours, softmax = seconds(together), seconds(lambda whole=whole: step(whole))
        print(f"length {length}, batch {batch}: {ours / softmax:.3f} of {1e3 * softmax:.3f} ms")


def step(qkv: list[Tensor]) -> object:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = fused(*qkv)
    return torch.autograd.grad(out, qkv, torch.ones_like(out))


def seconds(work: Callable[[], object]) -> float:
    replay = step_graph(work).graph.replay
    return statistics.median(elapsed(replay, CUDA) for _ in range(40))


if __name__ == "__main__":
    if sys.argv[1:] not in (["half"], ["streams"]):
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/cudnn.py needs a CUDA device; torch sees none")
    warnings.simplefilter("ignore")  # torch says at length why it refuses a back end; `half` prints what is refused
    {"half": half, "streams": streams}[sys.argv[1]]()
