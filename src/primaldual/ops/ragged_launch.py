"""From tensors to launches of the ragged kernels: tile shapes, the order of work, little to do per call."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LOG2E = 1.4426950408889634
_TRITON = find_spec("triton") is not None  # looked up once, and where no compiler traces it
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


class Tiles(NamedTuple):
    """Rows and columns of a block, warps and pipeline stages: forward; backward over keys and over queries.

    Where `registers` is set the backward pass can go over whole heads in one sweep, with at most so many to a thread.
    Where `adding` is set (rows, columns, warps, stages, registers) its blocks of keys can add their shares of dq.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    key_rows: int
    key_columns: int
    query_rows: int
    query_columns: int
    back_warps: int
    back_stages: int
    registers: int = 0
    adding: tuple[int, ...] = ()


class Layout(NamedTuple):
    """Where a head's points are: row, number and window of each, then offset and strides of its keys and values."""

    head: int
    points: int
    window: int
    k_offset: int
    k_batch: int
    k_row: int
    v_offset: int
    v_batch: int
    v_row: int


@functools.cache
def kernels() -> ModuleType:
    """The Triton kernels; imported when first needed, since a CPU has no use for them."""
    from . import ragged_kernels

    return ragged_kernels


def without_triton() -> str | None:
    return None if _TRITON else "Triton is not installed"


def interpreted() -> bool:
    return _TRITON and _INTERPRETED


def tiles(head_dim: int, dtype: torch.dtype, queries: int) -> Tiles:
    """Block shapes by head dimension, dtype and length; measured on an H200."""
    wide = max(16, _power(head_dim))
    if dtype == torch.float32:
        found = Tiles(64, 32, 4, 2, 32, 64, 64, 32, 4, 1) if wide <= 64 else Tiles(32, 32, 4, 1, 32, 32, 32, 32, 4, 1)
    elif wide <= 16:
        found = Tiles(64, 64, 4, 3, 32, 128, 128, 32, 4, 4, 168, (64, 128, 4, 3, 0))
    elif wide <= 32:
        found = Tiles(64, 64, 4, 3, 64, 128, 128, 32, 4, 3, 255)
    elif wide <= 64:
        found = Tiles(64, 64, 4, 3, 64 if queries <= 768 else 32, 64, 64, 64, 4, 3)
    else:
        found = Tiles(128, 64, 8, 2, 64, 64, 64, 64, 8, 1)
    most = max(16, _power(queries))
    return found._replace(
        rows=min(found.rows, most), key_rows=min(found.key_rows, most), query_rows=min(found.query_rows, most)
    )


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class _Back(NamedTuple):
    """How a backward pass is worked through: tile shapes, the order of work on the device, and its kinds of work."""

    tile: Tiles
    tasks: Tensor
    parts: int  # the sum of 2^kind


class _Work(NamedTuple):
    """How one layout is worked through: tile shapes, and the table of heads and the order of work on the device."""

    tile: Tiles
    table: Tensor
    forward: Tensor
    back: _Back
    exact: _Back  # the same where everything must be added in the same order every time
    aligned: bool  # every offset and stride is a multiple of 8 elements: rows can be read 16 bytes at a time


_FILL = 2 * 132
"""Sweeps over the longest head that keep a GPU busy: two on every multiprocessor."""

_SWEEP = (32, 3)
"""Rows of a block and pipeline stages of a sweep."""

worked: set[tuple[object, ...]] = set()
"""What has its tables on the device."""


@functools.cache
def _work(
    layout: tuple[int, ...], batch: int, queries: int, widest: int, dtype: torch.dtype, causal: bool,
    device: torch.device,
) -> _Work:  # fmt: skip
    """Longest pieces first."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention of this shape must run once, on a side stream, before it is captured in a graph")
    tile = tiles(widest, dtype, queries)
    rows = [Layout(*layout[i : i + 9]) for i in range(0, len(layout), 9)]
    blocks = -(-queries // tile.rows)
    order = [(0, row, b, m) for row in range(len(rows)) for b in range(batch) for m in range(blocks)]

    def put(data: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(data, dtype=dtype).reshape(len(data), -1).to(device)

    def back(adding: bool) -> _Back:
        tile_, tasks = _order(rows, batch, queries, tile, causal, adding)
        return _Back(tile_, put(tasks, torch.int32), sum({2 ** task[0] for task in tasks}))

    best = back(dtype != torch.float32)
    exact = back(False) if best.parts == 16 else best
    worked.add((layout, batch, queries, widest, dtype, causal, device))
    return _Work(
        tile,
        put(rows, torch.int64),
        put(order, torch.int32),
        best,
        exact,
        all(number % 8 == 0 for i, number in enumerate(layout) if i % 9 >= 3),
    )


def _order(
    rows: Sequence[Layout], batch: int, queries: int, tile: Tiles, causal: bool, adding: bool
) -> tuple[Tiles, list[tuple[int, int, int, int]]]:
    """Of a backward pass. A head whose points fit in one block gets its dq from there (kind 2).

    Where some are longer one piece is a block of points that adds to dq (kind 4) if that may be added in any order,
    `adding`, or a whole head (kind 3) if there are many.
    """
    points = [head.points for head in rows]
    longer = not causal and min(points) > 0 and max(points) > tile.key_columns
    adding = longer and adding and len(tile.adding) > 0
    sweep = longer and not adding and tile.registers > 0 and batch * sum(points) >= _FILL * max(points)
    if sweep:
        tile = tile._replace(key_rows=min(_SWEEP[0], tile.key_rows), back_stages=_SWEEP[1])
    elif adding:
        most, columns, warps, stages, registers = tile.adding
        tile = tile._replace(
            key_rows=min(most, max(16, _power(queries))), key_columns=columns, back_warps=warps, back_stages=stages,
            registers=registers,
        )  # fmt: skip
    elif causal or max(points) > tile.key_columns:
        tile = tile._replace(registers=0)
    back_blocks = -(-queries // tile.query_rows)
    back: list[tuple[int, tuple[int, int, int, int]]] = []
    whole = [not causal and head.points <= tile.key_columns for head in rows]
    for row, head in enumerate(rows):
        kind, cost = (4, 5) if adding else (2, 5) if whole[row] else (0, 4)
        for b in range(batch):
            key_blocks = max(1, -(-head.points // tile.key_columns))
            if sweep:
                back.append((key_blocks, (3, row, b, 0)))
                continue
            back += [(cost * tile.key_columns * queries, (kind, row, b, n)) for n in range(key_blocks)]
    for row, head in enumerate(rows):
        if not (whole[row] or sweep or adding):
            cost = 3 * tile.query_rows * head.points
            back += [(cost, (1, row, b, m)) for b in range(batch) for m in range(back_blocks)]
    back.sort(key=lambda item: -item[0])
    return tile, [task for _, task in back]


class Ready(NamedTuple):
    """A kernel that is compiled for a kind of call: how to run it, and its arguments after the tensors."""

    run: Callable[..., None]
    rest: tuple[object, ...]
    compiled: Any
    grid: tuple[int, int, int]


class Launch(NamedTuple):
    """A launch that was noted down."""

    name: str
    tensors: tuple[Tensor | None, ...]
    ready: Ready


_ready: dict[tuple[object, ...], Ready] = {}
_notes = threading.local()


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Inside, in this thread, kernels are compiled and noted down instead of launched."""
    launches: list[Launch] = []
    _notes.launches = launches
    try:
        yield launches
    finally:
        del _notes.launches


def _launch(
    key: tuple[object, ...],
    tensors: tuple[Tensor | None, ...],
    prepare: Callable[[], tuple[Any, tuple[int, int, int], tuple[object, ...], dict[str, int]]],
) -> None:
    """Launch a kernel on tensors; past Triton's own look at every argument when the same kind of call was seen before.

    `key` tells apart whatever the kernel is specialised by, its name first; `prepare` gives the kernel, its grid, the
    arguments after the tensors, and the compiler's options.
    """
    ready = _ready.get(key)
    notes: list[Launch] | None = getattr(_notes, "launches", None)
    if ready is not None and notes is None:
        ready.run(*tensors, *ready.rest)
        return
    if ready is None:
        kernel, grid, rest, options = prepare()
        early = not interpreted() and _starts_early(torch.cuda.current_device())
        rest = (*rest, early)
        if not interpreted():
            options = options | {"launch_pdl": early}
        if notes is None:
            compiled = kernel[grid](*tensors, *rest, **options)
        else:
            compiled = kernel.warmup(*tensors, *rest, grid=grid, **options)
        if compiled is None:  # the interpreter gives nothing back
            return
        ready = _ready[key] = Ready(compiled[grid], rest, compiled, grid)
    if notes is not None:
        notes.append(Launch(str(key[0]), tensors, ready))


@functools.cache
def _starts_early(device: int) -> bool:
    """Whether a launch may get ready while the one before it still runs: from Hopper on."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def _options(warps: int, stages: int, registers: int = 0) -> dict[str, int]:
    options = {"num_warps": warps, "num_stages": stages}
    return options | {"maxnreg": registers} if registers else options


def _kind(*tensors: Tensor | None) -> tuple[object, ...]:
    """What a kernel is specialised by in tensors that a caller gave."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors)


def _precision(q: Tensor) -> str:
    if q.dtype != torch.float32 or q.device.type != "cuda":
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _three(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _eights(*tensors: Tensor) -> bool:
    """Whether all strides are multiples of 8, so that 16 bytes can be read at a time, and not all are of 16."""
    strides = [stride for x in tensors for stride in _three(x)]
    return all(stride % 8 == 0 for stride in strides) and any(stride % 16 for stride in strides)


def in_rows(x: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, as the kernels need it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Call(NamedTuple):
    """What the kernels of one call share."""

    layout: tuple[int, ...]
    shift: Tensor | None = None
    bias: Tensor | None = None
    own_k: Tensor | None = None
    own_v: Tensor | None = None
    own_bias: Tensor | None = None
    causal: bool = False
    dropout_p: float = 0.0
    seed: Tensor | None = None
    tokens: tuple[Tensor | None, Tensor | None] = (None, None)  # keys and values of heads whose windows hold one token
    marks: Tensor | None = None  # what a sparse pattern keeps, see `ragged_marks`

    @property
    def threshold(self) -> int:
        """A weight is dropped where its 32 random bits are below this."""
        return min(int(self.dropout_p * 2**32), 2**32 - 1)

    @property
    def has(self) -> tuple[bool, bool, bool, bool, bool]:
        """Whether it is causal, and has a shift, a bias, points of their own, dropout."""
        own = self.own_k is not None
        return self.causal, self.shift is not None, self.bias is not None, own, self.dropout_p > 0.0

    @property
    def pattern(self) -> int:
        """0: none; 1: near points alone; 2: points around a circle, too."""
        return 0 if self.marks is None else self.marks.shape[1] - 1

    @property
    def widths(self) -> tuple[int, int]:
        """How long the rows of the bias and of the marks are."""
        return 0 if self.bias is None else self.bias.shape[2], 0 if self.marks is None else self.marks.shape[2]

    @property
    def token_strides(self) -> tuple[int, ...]:
        return tuple(stride for x in self.tokens for stride in ((0, 0, 0) if x is None else _three(x)))

    @property
    def tokens_aligned(self) -> bool:
        """Whether rows of the tokens can be read 16 bytes at a time."""
        return all(x is None or x.data_ptr() % 16 == 0 for x in self.tokens) and not any(
            stride % 8 for stride in self.token_strides
        )


def output(q: Tensor, value_dim: int) -> Tensor:
    """Empty, [B, H, L, value_dim], with heads side by side in memory where the queries' are: layers want it so."""
    B, H, L, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(B, L, H, value_dim).transpose(1, 2)
    return q.new_empty(B, H, L, value_dim)


def forward(q: Tensor, keys: Tensor, values: Tensor, value_dim: int, call: Call) -> tuple[Tensor, Tensor]:
    B, H, L, D = q.shape
    out = output(q, value_dim)
    lse = torch.empty(B, H, L, device=q.device, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse

    def prepare() -> Any:
        work = _work(call.layout, B, L, max(D, value_dim), q.dtype, call.causal, q.device)
        tile = work.tile
        numbers = (
            *_three(q), *_three(out), *call.token_strides, *call.widths, H, L, _LOG2E / math.sqrt(D), call.threshold,
            1.0 - call.dropout_p, D, value_dim, max(16, _power(D)), max(16, _power(value_dim)), tile.rows,
            tile.columns, *call.has, call.pattern, call.tokens[0] is not None, work.aligned and call.tokens_aligned,
            _eights(q, out), _precision(q),
        )  # fmt: skip
        grid = (work.forward.shape[0], 1, 1)
        return kernels().forward, grid, (work.table, work.forward, *numbers), _options(tile.warps, tile.stages)

    _launch(
        (
            "forward", call.layout, call.dropout_p, call.causal, value_dim, _precision(q), q.device,
            *_kind(q, keys, values, call.shift, call.bias, call.own_k, *call.tokens, call.marks),
        ),
        (q, keys, values, call.shift, call.bias, call.own_k, call.own_v, call.own_bias, out, lse, call.seed,
         *call.tokens, call.marks),
        prepare,
    )  # fmt: skip
    return out, lse


class _Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    shift: Tensor | None
    own_k: Tensor | None
    own_v: Tensor | None


def backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, call: Call,
    dk: Tensor, dv: Tensor, tokens: int, want_shift: bool = True, dq: Tensor | None = None,
) -> _Gradients:  # fmt: skip
    """Gradients. dk and dv are flat, like keys and values; or, where `tokens` is given, [B, H, tokens, D].

    dq is made where it is not given.
    """
    B, H, L, D = q.shape
    value_dim = out.shape[-1]
    grad = in_rows(grad)
    dq = output(q, D) if dq is None else dq
    own_k = own_v = delta = sums = None
    if call.own_k is not None:
        own_k = torch.empty(B, H, L, D, dtype=q.dtype, device=q.device)
        own_v = torch.empty(B, H, L, value_dim, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return _Gradients(dq, dk.zero_(), dv.zero_(), None, own_k, own_v)
    work = _work(call.layout, B, L, max(D, value_dim), q.dtype, call.causal, q.device)
    tile, tasks, parts = work.exact if torch.are_deterministic_algorithms_enabled() else work.back
    block_d, block_dv = max(16, _power(D)), max(16, _power(value_dim))
    if call.shift is not None:  # rounded as in the forward pass, or else large scores do not find their log-sum-exp
        shifted = output(q, D)
        place(q, shifted, add=-call.shift)
        q = shifted
    sweep, adding, width = parts == 8, parts == 16, -(-L // 128) * 128
    if sweep or adding:
        sums = q.new_empty((B, H, L, D) if sweep else (B, H, width, block_d), dtype=torch.float32)
    if parts != 4:
        once = sweep or adding
        delta = lse.new_empty(B, H, 3, width) if once else torch.empty_like(lse)
        zeros = sums if adding else None
        _launch(
            ("delta", once, call.dropout_p, q.device, *_kind(out, grad, zeros)),
            (out, grad, delta, lse, call.seed, zeros),
            lambda: (
                kernels().delta, ((width if once else -(-L // 64) * 64) // 64, B * H, 1),
                (*_three(out), *_three(grad), H, L, width, 1.0 - call.dropout_p, block_d, value_dim, block_dv, 64,
                 call.dropout_p > 0.0, once, _eights(out, grad)), _options(4, 1),
            ),
        )  # fmt: skip

    def prepare() -> Any:
        expand = tokens > 0
        numbers = (
            *_three(q), *_three(grad), *_three(dq), *((*_three(dk), *_three(dv)) if expand else (0,) * 6),
            *call.token_strides, *call.widths, H, L, width, tokens, _LOG2E / math.sqrt(D), call.threshold,
            1.0 - call.dropout_p, D, value_dim, block_d, block_dv, tile.key_rows, tile.key_columns, tile.query_rows,
            tile.query_columns, call.causal, *call.has[2:], call.pattern, expand, parts, L % tile.key_rows == 0,
            call.tokens[0] is not None, work.aligned and call.tokens_aligned,
            _eights(q, grad, dq, *((dk, dv) if expand else ())), _precision(q),
        )  # fmt: skip
        registers, short = tile.registers, q.dtype.itemsize == 2
        if call.pattern and call.bias is None and parts == 3 and block_d == 64 and tile.key_rows == 32 and short:
            registers = 168  # as many as without a pattern, and no spills: three programs a multiprocessor
        options = _options(tile.back_warps, tile.back_stages, registers)
        return kernels().backward, (tasks.shape[0], 1, 1), (work.table, tasks, *numbers), options

    _launch(
        (
            "backward", parts, call.layout, call.dropout_p, call.causal, tokens, _precision(q), q.device,
            *_kind(q, grad, keys, values, call.bias, call.own_k, dq, dk, dv, *call.tokens, call.marks),
        ),
        (q, keys, values, call.bias, call.own_k, call.own_v, call.own_bias, grad, lse, delta, sums, call.seed, dq, dk,
         dv, own_k, own_v, *call.tokens, call.marks),
        prepare,
    )  # fmt: skip
    if adding:
        _launch(
            ("settle", tile.key_rows, call.dropout_p, q.device, *_kind(sums, dq)),
            (sums, dq),
            lambda: (
                kernels().settle, (-(-L // tile.key_rows), H, B),
                (*_three(dq), H, L, width, 1 / (math.sqrt(D) * (1.0 - call.dropout_p)), D, block_d, tile.key_rows,
                 _eights(dq)), _options(4, 1),
            ),
        )  # fmt: skip
    dshift = -dq.sum(2, dtype=torch.float32) if call.shift is not None and want_shift else None
    return _Gradients(dq, dk, dv, dshift, own_k, own_v)


_SPAN = 512
"""Rows that one program of `sum_rows` adds up."""


@functools.lru_cache(maxsize=256)
def _pool_blocks(layout: tuple[int, ...]) -> tuple[int, int]:
    """Tokens of a block, which must hold a window; and the most blocks that a head has."""
    size = max(64, _power(max(layout[2::9])))
    return size, max(-(-count // (size // window)) for count, window in zip(layout[1::9], layout[2::9], strict=True))


def pool(
    k: Tensor, v: Tensor, layout: tuple[int, ...], want_mean: bool, before: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values of the points, flat; and the mean of the keys, [B, H, D], where it is wanted.

    The `before` first heads of the layout have no place there.
    """
    B, H, S, D = k.shape
    DV = v.shape[-1]
    rows = B * sum(layout[1 + 9 * before :: 9])
    keys, values = k.new_empty(rows * D), v.new_empty(rows * DV)
    size, blocks = _pool_blocks(layout[9 * before :])
    sums = torch.empty(B, H, blocks, D, device=k.device, dtype=torch.float32) if want_mean else None

    def prepare() -> Any:
        work = _work(layout, B, S, max(D, DV), k.dtype, False, k.device)
        numbers = (
            *_three(k),
            *_three(v),
            H,
            S,
            blocks,
            before,
            D,
            DV,
            max(16, _power(D)),
            max(16, _power(DV)),
            size,
            want_mean,
        )
        return kernels().pool, (blocks, H - before, B), (work.table, *numbers, work.aligned), _options(4, 1)

    _launch(("pool", layout, want_mean, before, k.device, *_kind(k, v)), (k, v, keys, values, sums), prepare)
    if sums is None:
        return keys, values, None
    return keys, values, sums.sum(2) / _points_per_head(layout, k.device)


@functools.lru_cache(maxsize=256)
def _points_per_head(layout: tuple[int, ...], device: torch.device) -> Tensor:
    counts = dict(zip(layout[0::9], layout[1::9], strict=True))
    return torch.tensor([float(counts[h]) for h in range(len(counts))], device=device)[:, None]


def place(x: Tensor, to: Tensor, *, add: Tensor | None = None, window: int = 1) -> None:
    """to[b, h, i] = (x[b, h, ⌊i/window⌋] + add[b, h]) / window, for [B, H, N, D]; add is float32 and contiguous."""
    B, H, N, D = to.shape
    x = in_rows(x)
    _launch(
        ("place", window, add is None, to.device, *_kind(x, to)),
        (x, to, add),
        lambda: (
            kernels().place, (-(-N // 128), H, B),
            (*_three(x), *_three(to), H, N, window, 1 / window, D, max(16, _power(D)), 128, add is not None),
            _options(4, 1),
        ),
    )  # fmt: skip


def sum_rows(x: Tensor) -> Tensor:
    """Σ x[b, h, i] over blocks of rows, [B, H, blocks, D], float32."""
    B, H, N, D = x.shape
    x = in_rows(x)
    blocks = -(-N // _SPAN)
    sums = torch.empty(B, H, blocks, D, device=x.device, dtype=torch.float32)
    _launch(
        ("sum_rows", x.device, *_kind(x)),
        (x, sums),
        lambda: (
            kernels().sum_rows, (blocks, H, B), (*_three(x), H, N, _SPAN, D, max(16, _power(D)), 64), _options(4, 1)
        ),
    )  # fmt: skip
    return sums


def less_mean(x: Tensor, sums: Tensor, to: Tensor, factor: float, beta: Tensor | None) -> None:
    """to = x − factor · β · (the sum over the blocks of `sums`), for [B, H, N, D]; β is [H], or None for 1."""
    B, H, N, D = to.shape
    x, blocks = in_rows(x), sums.shape[2]
    _launch(
        ("less_mean", blocks, factor, beta is None, to.device, *_kind(x, to)),
        (x, sums, beta, to),
        lambda: (
            kernels().less_mean, (-(-N // 128), H, B),
            (*_three(x), *_three(to), H, N, blocks, factor, D, max(16, _power(D)), 128, min(16, _power(blocks))),
            _options(4, 1),
        ),
    )  # fmt: skip


def unpool(dkeys: Tensor, dvalues: Tensor, dmean: Tensor, dk: Tensor, dv: Tensor, layout: tuple[int, ...]) -> None:
    """Gradients of points, and of the mean of the keys, into those of the tokens."""
    B, H, S, D = dk.shape
    DV = dv.shape[-1]

    def prepare() -> Any:
        work = _work(layout, B, S, max(D, DV), dk.dtype, False, dk.device)
        numbers = (*_three(dk), *_three(dv), H, S, D, DV, max(16, _power(D)), max(16, _power(DV)), 64, work.aligned)
        return kernels().unpool, (-(-S // 64), H, B), (work.table, *numbers), _options(4, 1)

    _launch(("unpool", layout, dk.device, *_kind(dk, dv)), (dkeys, dvalues, dmean, dk, dv), prepare)
