"""A compiled Triton kernel's parameters, packed as Triton's own launcher packs them.

They are read off Triton's description of the kernel and checked against its PTX.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from .notes import Ready

FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
"""Triton's scalar types as `struct` has them."""


class RefusedError(RuntimeError):
    """Something is not as expected, so that the call must stay in Python."""


def pack(
    ready: Ready, tensors: tuple[Tensor | None, ...], place: Callable[[Tensor], tuple[int, int] | None]
) -> tuple[Any, ...]:  # fmt: skip
    """Handle, grid, threads, shared memory, whether it starts early; parameters, and which of them are places.

    A parameter is 8 bytes as an integer; a smaller one has the first of them.
    """
    compiled, metadata = ready.compiled, ready.compiled.metadata
    if getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "launch_cooperative_grid", False):
        raise RefusedError("clusters and cooperative launches")
    if any(getattr(metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        raise RefusedError("scratch memory")
    kinds = list(compiled.src.signature.values())
    arguments = (*tensors, *ready.rest)
    if len(kinds) != len(arguments) or metadata.target.warp_size != 32 or not compiled.function:
        raise RefusedError("an unknown kind of kernel")
    cells: list[int] = []
    widths: list[int] = []
    pointers: list[tuple[int, int, int]] = []
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(kind, str) and kind.startswith("*") and isinstance(argument, Tensor):
            if (found := place(argument)) is not None:
                pointers.append((len(cells), *found))
            cells.append(argument.data_ptr() if found is None else 0)
            widths.append(64)
        elif kind in FORMATS and isinstance(argument, (bool, int, float)):
            data = struct.pack(f"<{FORMATS[kind]}", argument)
            cells.append(int.from_bytes(data, "little"))
            widths.append(8 * len(data))
        else:
            raise RefusedError(f"an argument of type {kind}")
    declared = parameters(compiled.asm.get("ptx", ""))
    scratch = len(declared) - len(cells)  # pointers to scratch memory, of which there is none
    if declared != [*widths, *[64] * scratch] or not 0 <= scratch <= 2:
        raise RefusedError("parameters that Triton does not describe")
    threads, shared = 32 * metadata.num_warps, metadata.shared
    early = bool(getattr(metadata, "launch_pdl", False))
    return compiled.function, ready.grid, threads, shared, early, cells + [0] * scratch, pointers


def parameters(ptx: str) -> list[int]:
    """Bits of the parameters of a compiled kernel."""
    entry = re.search(r"\.entry[^(]*\(([^)]*)\)", ptx)
    return [int(bits) for bits in re.findall(r"\.param\s+\.[a-z]+(\d+)", entry[1])] if entry else []


def hooked() -> bool:
    """Whether a profiler listens to Triton's launches."""
    runtime = import_module("triton.knobs").runtime
    hooks = (getattr(runtime, f"launch_{when}_hook", None) for when in ("enter", "exit"))
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
