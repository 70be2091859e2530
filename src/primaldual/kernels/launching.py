"""Launching Triton kernels, past Triton's own look at every argument after the first time."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .kept import Kept
from .native.notes import Launch, Ready, notes

_TRITON = find_spec("triton") is not None  # looked up once, and where no compiler traces it
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels take."""

MULTIPROCESSORS = 132
"""Of a large GPU, an H200: among so many the work of a launch is divided."""


def relative_size(device: torch.device) -> float:
    """Multiprocessors of a GPU, as a multiple of an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count / MULTIPROCESSORS


def without_triton() -> str | None:
    return None if _TRITON else "Triton is not installed"


def interpreted() -> bool:
    return _TRITON and _INTERPRETED


def on_cpu() -> bool:
    """Whether the kernels take tensors of the CPU: those that the interpreter runs do."""
    return interpreted()


def launches(x: Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return x.dtype in DTYPES and without_triton() is None and (x.is_cuda or on_cpu())


def refusal_of_dtype(dtype: torch.dtype) -> str | None:
    """Why the kernels do not take tensors of this dtype; None where they do. To follow the kernel's name."""
    return None if dtype in DTYPES else f"takes {', '.join(str(d)[6:] for d in DTYPES)}, not {str(dtype)[6:]}"


def refusal_of_device(device: torch.device) -> str | None:
    """Why the kernels do not run on this device; None where they do. To follow the kernel's name."""
    if device.type != "cuda" and not on_cpu():
        return f"runs on a CUDA device, not on {device.type}"
    return "cannot be compiled: Triton is not installed" if without_triton() else None


def captured(x: Tensor) -> bool:
    """Whether a CUDA graph is captured, or a compiler traces: what the host does here, it does once.

    So does any stream but the default one, which no graph can capture: as torch advises, what is to be captured is run
    on a side stream before, and both must choose alike.
    """
    return x.is_cuda and (
        torch.compiler.is_compiling()
        or torch._C._cuda_getCurrentRawStream(x.get_device()) != 0  # current_stream makes objects
    )


def seed_of(x: Tensor, dropout_p: float) -> Tensor | None:
    """Drawn on the device by torch's generator, so that a replayed CUDA graph drops other weights each time."""
    if not dropout_p:
        return None
    return torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=x.device)


def traced() -> bool:
    """Whether something looks at the operators: a compiler, a dispatch mode such as a FLOP counter, a transform.

    Otherwise the operator's dispatch is left out, which costs more than a launch.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


_EXPORT_IS_TOLD = torch.__version__ >= "2.13"
"""Before, `torch.compiler.is_exporting` is true of whatever `torch.compile` traces, too."""


def exporting() -> bool:
    """Whether what is traced now shall run at other lengths: then nothing that is true of this one may be settled."""
    return torch.compiler.is_exporting() and (_EXPORT_IS_TOLD or not torch.compiler.is_dynamo_compiling())


_ready: Kept[Ready] = Kept(8192)
"""Compiled kernels by kind of call, with the tables that they read: about a thousand shapes have so many."""


def _stream(x: Tensor | None) -> int | None:
    """Torch's current stream, 0 for the default one, which no graph captures; None where there is no GPU."""
    if x is None or not x.is_cuda:
        return None
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def launch(
    key: tuple[Hashable, ...],
    tensors: tuple[Tensor | None, ...],
    prepare: Callable[[], tuple[Any, tuple[int, int, int], tuple[object, ...], dict[str, int]]],
    early: bool = True,
) -> None:
    """Launch a kernel on tensors; past Triton's own look at every argument when the same kind of call was seen before.

    `key` tells apart whatever the kernel is specialised by, its name first; `prepare` gives the kernel, its grid, the
    arguments after the tensors, and the compiler's options. A kernel that can start `early` has one argument more,
    which says whether it does.
    """
    ready = _ready.get(key)
    steps = notes()
    if ready is not None and steps is None:
        stream = _stream(tensors[0])
        if stream and torch.cuda.is_current_stream_capturing():
            _ready.pin(key, ready)
        ready.run(*tensors, *ready.rest, stream=stream)
        return
    if ready is None:
        kernel, grid, rest, options = prepare()
        if early:
            now = not interpreted() and starts_early(torch.cuda.current_device())
            rest = (*rest, now)
            options = options if interpreted() else options | {"launch_pdl": now}
        if steps is None:
            compiled = kernel[grid](*tensors, *rest, **options)
        else:
            compiled = kernel.warmup(*tensors, *rest, grid=grid, **options)
        if compiled is None:  # the interpreter gives nothing back
            return
        ready = Ready(compiled[grid], rest, compiled, grid)
        stream = _stream(tensors[0])
        _ready.add(key, ready, bool(stream) and torch.cuda.is_current_stream_capturing())
    if steps is not None:
        steps.append(Launch(str(key[0]), tensors, ready))


def launch_kernel(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[object, ...],
    warps: int = 4, stages: int = 3,
) -> None:  # fmt: skip
    """Launch a kernel that does not start early, with tensors and then numbers, strides and constants among them.

    They tell apart whatever it is specialised by, so that nobody has to name that.
    """
    kinds = (None if x is None else (x.dtype, x.device, x.data_ptr() % 16 == 0) for x in tensors)
    launch(
        (kernel.__name__, kernel.fn, grid, numbers, warps, stages, *kinds),  # names stand in several files
        tensors,
        lambda: (kernel, grid, numbers, options(warps, stages)),
        early=False,
    )


@functools.cache
def starts_early(device: int) -> bool:
    """Whether a launch may get ready while the one before it still runs: from Hopper on."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def options(warps: int, stages: int, registers: int = 0) -> dict[str, int]:
    """For the compiler; 0 registers: as many as it likes."""
    options = {"num_warps": warps, "num_stages": stages}
    return options | {"maxnreg": registers} if registers else options


def specialised_by(*tensors: Tensor | None) -> tuple[object, ...]:
    """What a kernel is specialised by in tensors that a caller gave."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors)


def precision(q: Tensor) -> str:
    """Of the products of these queries."""
    return precision_asked() if q.dtype == torch.float32 and q.device.type == "cuda" else "ieee"


def precision_asked() -> str:
    """What torch is told of products in float32 on a GPU. Its older setting, `allow_tf32`, cannot be read there."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def strides_of(*tensors: Tensor | None) -> tuple[int, ...]:
    """The strides of batch, head and row of each; zeros of those that are not there."""
    return tuple(stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3]))


def multiples_of_8_alone(*tensors: Tensor | None) -> bool:
    """Whether all strides are multiples of 8, so that 16 bytes can be read at a time, and not all are of 16."""
    strides = strides_of(*tensors)
    return all(stride % 8 == 0 for stride in strides) and any(stride % 16 for stride in strides)


def in_rows(x: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, as the kernels need it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_like_heads(x: Tensor, dim: int) -> Tensor:
    """Uninitialised [B, H, N, dim]; heads stand inside the tokens where they do in x, and merging them is no copy."""
    B, H, N, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, N, H, dim).transpose(1, 2)
    return x.new_empty(B, H, N, dim)


def power_of_2(n: int) -> int:
    """The least that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def span_of(rows: int, tile: int, programs: int) -> int:
    """Rows of one program, where at most so many share the work: whole tiles."""
    return max(1, -(-rows // (max(1, programs) * tile))) * tile


def block_of(dim: int) -> int:
    """The elements of a row as kernels take them: a power of two, and enough for a product."""
    return max(16, power_of_2(dim))
