"""What the compiled part (`native`) must know to run a kind of call: what to allocate, and what every kernel is given.

The Python path is walked once with its launches noted down instead of made. A kernel's parameters are then packed as
Triton's own launcher packs them, read off Triton's description of the compiled kernel and checked against its PTX;
whatever is not as expected is refused, and the call stays in Python.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .launching import Launch, Ready, noted

ROLES = {
    "sum_rows": "k sums",
    "pool": "k v keys values -",
    "forward": "q keys values sums beta - - - - out lse seed k v - shifted",
    "delta": "out grad delta lse seed scratch",
    "backward": "q keys values - - - - grad lse delta scratch seed dq dk dv - - k v -",
    "settle": "scratch dq",
    "sum_rows again": "dq of_queries",
    "place": "dk of_queries beta dk",
}
"""What the tensors of a launch are."""

KEPT, SCRATCH = ("lse", "keys", "values", "shifted"), ("delta", "scratch")
OWN = ("q", "k", "v", "out", "sums", "grad", "dq", "dk", "dv", "of_queries")
"""Kept for the way back, of the backward pass alone, and tensors of their own."""

FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
"""Triton's scalar types as `struct` has them."""

_held: list[Ready] = []
"""Kernels and tables that recipes point to."""


class RefusedError(RuntimeError):
    """A kernel is not as expected, so that Triton must launch it."""


def learn(
    library: ModuleType,
    forward: Callable[..., tuple[Tensor, ...]],
    gradients: Callable[..., tuple[Tensor, ...]],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    scales: tuple[int, ...],
    is_causal: bool,
    dropout_p: float,
    factor: float,
) -> None:
    """Make the recipe of a kind of call (q, k, v, beta, seed), or note that there is none.

    `factor` leads from sums over keys to their mean.
    """
    q, k, v, beta, seed = tensors
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    back = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, beta))
    settings = scales, is_causal, dropout_p, seed
    try:
        with torch.no_grad(), torch.cuda.device_of(q), noted() as launches:
            out, lse, keys, values, _, shifted = forward(q, k, v, beta, *settings, back=back)
            if back:
                queries = q if beta is None else shifted
                gradients(torch.empty_like(out), queries, k, v, beta, out, lse, keys, values, *settings)
        recipe = _parts(launches, max(scales) > 1, beta is not None)
        _held.extend(launch.ready for launch in launches)
    except RefusedError:
        recipe = {}, {}, (0, []), (0, []), False
    library.learn(q, k, v, beta, scales, is_causal, dropout_p, *recipe, factor)


def _parts(launches: Sequence[Launch], pooled: bool, recentred: bool) -> tuple[Any, ...]:
    """Packed launches by name, tensors to allocate by role, and what shares one allocation: its size and places.

    And whether the gradients of q, k and v are thirds of one buffer.
    """
    if _hooked():
        raise RefusedError("something listens to Triton's launches")
    packed: dict[str, Any] = {}
    found: dict[str, Tensor] = {}
    for launch in launches:
        name = f"{launch.name} again" if launch.name in packed else launch.name
        roles = _roles(name, pooled, recentred)
        packed[name] = pack(launch.ready, launch.tensors, roles)
        found |= {role: x for role, x in zip(roles, launch.tensors, strict=True) if x is not None}
    buffers = {
        role: (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)
        for role in OWN
        if (x := found.get(role)) is not None
    }
    gradients = [found[role].untyped_storage().data_ptr() for role in ("dq", "dk", "dv") if role in found]
    together = len(gradients) == 3 and len(set(gradients)) == 1
    return packed, buffers, _block(found, KEPT), _block(found, SCRATCH), together


def _roles(name: str, pooled: bool, recentred: bool) -> list[str]:
    other = {} if pooled else {"keys": "k", "values": "v"}
    if name == "backward" and recentred:
        other |= {"q": "shifted"}
    return [other.get(role, role) for role in ROLES[name].split()]


def _block(found: dict[str, Tensor], roles: Sequence[str]) -> tuple[int, list[tuple[str, int]]]:
    size, places = 0, []
    for role in roles:
        if role in found:
            places.append((role, size))
            size += -(-found[role].untyped_storage().nbytes() // 256) * 256
    return size, places


def pack(ready: Ready, tensors: tuple[Tensor | None, ...], roles: Sequence[str]) -> tuple[Any, ...]:
    """Handle, grid, threads, shared memory, whether it starts early; parameters, and which of them are which tensors.

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
    pointers: list[tuple[int, str]] = []
    for i, (kind, argument) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == "constexpr":
            continue
        if isinstance(kind, str) and kind.startswith("*") and isinstance(argument, Tensor):
            if i < len(roles):
                pointers.append((len(cells), roles[i]))
            cells.append(0 if i < len(roles) else argument.data_ptr())
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


def _hooked() -> bool:
    """Whether a profiler listens to Triton's launches."""
    runtime = import_module("triton.knobs").runtime
    hooks = (getattr(runtime, f"launch_{when}_hook", None) for when in ("enter", "exit"))
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
