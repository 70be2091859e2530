"""From tensors to launches of the ragged kernels, forward and backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import launching
from ..launching import (
    block_of,
    empty_like_heads,
    in_rows,
    multiples_of_8_alone,
    options,
    power_of_2,
    precision,
    specialised_by,
    strides_of,
)
from . import work as ragged_work
from .layout import Layout
from .passes import Shift, place
from .work import ADDING, KEYS, QUERIES, SWEEP, WHOLE_HEAD

_LOG2E = 1.4426950408889634


class Call(NamedTuple):
    """What the kernels of one call share."""

    layout: Layout
    shift: Shift | None = None  # of the queries
    bias: Tensor | None = None
    own_k: Tensor | None = None
    own_v: Tensor | None = None
    own_bias: Tensor | None = None
    causal: bool = False
    dropout_p: float = 0.0
    seed: Tensor | None = None
    tokens: tuple[Tensor | None, Tensor | None] = (None, None)  # keys and values, which windows of one token are
    running: bool = False  # queries have a point of their own, the mean of their window up to them, of the tokens
    marks: Tensor | None = None  # what a sparse pattern keeps, see `marks`

    @property
    def threshold(self) -> int:
        """A weight is dropped where its 32 random bits are below this."""
        return min(int(self.dropout_p * 2**32), 2**32 - 1)

    @property
    def has(self) -> tuple[bool, bool, bool, int, bool]:
        """Whether it is causal, and has a shift, a bias, dropout; and before the last: 1 where queries are given points
        of their own, 2 where these are running means."""
        own = 2 if self.running else int(self.own_k is not None)
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
        return strides_of(*self.tokens)

    @property
    def tokens_aligned(self) -> bool:
        """Whether rows of the tokens can be read 16 bytes at a time."""
        return all(x is None or x.data_ptr() % 16 == 0 for x in self.tokens) and not any(
            stride % 8 for stride in self.token_strides
        )


def forward(
    q: Tensor, keys: Tensor, values: Tensor, value_dim: int, call: Call, shifted: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs, made where they are not given, and log-sum-exps.

    The queries less their shift, as they were rounded, go to `shifted` [B, H, L, D].
    """
    B, H, L, D = q.shape
    out = empty_like_heads(q, value_dim) if out is None else out
    lse = torch.empty(B, H, L, device=q.device, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    sums, factor, beta, _, blocks = Shift.parts(call.shift)

    def prepare() -> Any:
        work = ragged_work.work(call.layout, B, L, max(D, value_dim), q.dtype, call.causal, q.device)
        tile = work.tile
        numbers = (
            *strides_of(q, out), *call.token_strides, *strides_of(shifted), *call.widths, H, L, blocks, factor,
            _LOG2E / math.sqrt(D), call.threshold, 1.0 - call.dropout_p, D, value_dim, block_of(D),
            block_of(value_dim), tile.rows, tile.columns, power_of_2(blocks), *call.has, call.pattern,
            call.tokens[0] is not None, work.aligned and call.tokens_aligned, multiples_of_8_alone(q, out, shifted),
            precision(q),
        )  # fmt: skip
        registers, wide = 0, block_of(max(D, value_dim))
        if call.bias is None and q.dtype.itemsize == 2:  # as many programs as without a shift or dropout
            if wide <= 64 and (call.shift is not None or call.running) and not call.pattern:
                registers = 128 if wide == 64 else 96
            elif wide <= 16 and call.dropout_p > 0.0:
                registers = 96
        arguments = work.table, work.forward, *numbers
        compiled_with = options(tile.warps, tile.stages, registers)
        return ragged_work.kernels().forward, (work.forward.shape[0], 1, 1), arguments, compiled_with

    launching.launch(
        (
            "forward", call.layout, call.dropout_p, call.causal, value_dim, factor, precision(q), q.device,
            *specialised_by(q, keys, values, sums, beta, call.bias, call.own_k, out, *call.tokens, call.marks, shifted),
        ),
        (q, keys, values, sums, beta, call.bias, call.own_k, call.own_v, call.own_bias, out, lse, call.seed,
         *call.tokens, call.marks, shifted),
        prepare,
    )  # fmt: skip
    return out, lse


class _Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    own_k: Tensor | None
    own_v: Tensor | None
    bias: Tensor | None
    own_bias: Tensor | None


def backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, call: Call,
    dk: Tensor, dv: Tensor, tokens: int, dq: Tensor | None = None, of_bias: bool = False,
) -> _Gradients:  # fmt: skip
    """Gradients; `of_bias`: those of the bias, too. dk and dv are flat, like keys and values; or, where `tokens` is
    given, [B, H, tokens, D].

    The queries are less their shift already where the call has none. dq is made where it is not given.
    """
    B, H, L, D = q.shape
    value_dim = out.shape[-1]
    grad = in_rows(grad)
    dq = empty_like_heads(q, D) if dq is None else dq
    own_k = own_v = dbias = down_bias = delta = sums = None
    if call.own_k is not None:
        own_k = torch.empty(B, H, L, D, dtype=q.dtype, device=q.device)
        own_v = torch.empty(B, H, L, value_dim, dtype=q.dtype, device=q.device)
    if of_bias and call.bias is not None:
        dbias = torch.zeros_like(call.bias)
        down_bias = None if call.own_bias is None else torch.empty_like(call.own_bias)
    if q.numel() == 0:
        return _Gradients(dq, dk.zero_(), dv.zero_(), own_k, own_v, dbias, down_bias)
    work = ragged_work.work(call.layout, B, L, max(D, value_dim), q.dtype, call.causal, q.device)
    tile, tasks, kinds = work.reproducible if torch.are_deterministic_algorithms_enabled() else work.back
    block_d, block_dv = block_of(D), block_of(value_dim)
    if call.shift is not None:  # rounded as in the forward pass, or else large scores do not find their log-sum-exp
        shifted = empty_like_heads(q, D)
        place(q, shifted, shift=call.shift)
        q = shifted
    sweep, adding, width = kinds == 1 << SWEEP, kinds == 1 << ADDING, -(-L // 128) * 128
    if sweep or adding:
        sums = q.new_empty((B, H, L, D) if sweep else (B, H, width, block_d), dtype=torch.float32)
    if kinds == 1 << WHOLE_HEAD:  # they are read as they are
        lse = lse.contiguous()
    else:
        delta = lse.new_empty(B, H, 2 + (call.dropout_p > 0.0), width)
        zeros = sums if adding else None
        launching.launch(
            ("delta", call.dropout_p, q.device, *specialised_by(out, grad, lse, zeros)),
            (out, grad, delta, lse, call.seed, zeros),
            lambda: (
                ragged_work.kernels().delta, (width // 32, B * H, 1),
                (*strides_of(out, grad), *lse.stride()[:2], H, L, width, 1.0 - call.dropout_p, block_d, value_dim,
                 block_dv, 32, call.dropout_p > 0.0, multiples_of_8_alone(out, grad)), options(4, 1),
            ),
        )  # fmt: skip

    def prepare() -> Any:
        expand = tokens > 0
        numbers = (
            *strides_of(q, grad, dq, *((dk, dv) if expand else (None, None))),
            *call.token_strides, *call.widths, H, L, width, tokens, _LOG2E / math.sqrt(D), call.threshold,
            1.0 - call.dropout_p, D, value_dim, block_d, block_dv, tile.key_rows, tile.key_columns, tile.query_rows,
            tile.query_columns, call.causal, *call.has[2:], call.pattern, expand, kinds, L % tile.key_rows == 0,
            call.tokens[0] is not None, work.aligned and call.tokens_aligned,
            multiples_of_8_alone(q, grad, dq, *((dk, dv) if expand else ())), precision(q),
        )  # fmt: skip
        registers = tile.registers
        small_tile = q.dtype.itemsize == 2 and block_d == 64 and tile.key_rows == 32
        if small_tile and call.pattern and call.bias is None and kinds == 1 << KEYS | 1 << QUERIES:
            registers = 168  # as many as without a pattern, and no spills: three programs a multiprocessor
        if small_tile and call.running:
            registers = 168
        if small_tile and kinds & 1 << WHOLE_HEAD and kinds < 1 << SWEEP and not any(call.has[2:]):
            registers = 168  # as many as where no head is whole
        compiled_with = options(tile.back_warps, tile.back_stages, registers)
        return ragged_work.kernels().backward, (tasks.shape[0], 1, 1), (work.table, tasks, *numbers), compiled_with

    launching.launch(
        (
            "backward", kinds, call.layout, call.dropout_p, call.causal, tokens, dbias is None, precision(q),
            q.device,
            *specialised_by(q, grad, keys, values, call.bias, call.own_k, dq, dk, dv, *call.tokens, call.marks),
        ),
        (q, keys, values, call.bias, call.own_k, call.own_v, call.own_bias, grad, lse, delta, sums, call.seed, dq, dk,
         dv, own_k, own_v, dbias, down_bias, *call.tokens, call.marks),
        prepare,
    )  # fmt: skip
    if adding:
        launching.launch(
            ("finish_dq", tile.key_rows, call.dropout_p, q.device, *specialised_by(sums, dq)),
            (sums, dq),
            lambda: (
                ragged_work.kernels().finish_dq, (-(-L // tile.key_rows), H, B),
                (*strides_of(dq), H, L, width, 1 / (math.sqrt(D) * (1.0 - call.dropout_p)), D, block_d, tile.key_rows,
                 multiples_of_8_alone(dq)), options(4, 1),
            ),
        )  # fmt: skip
    return _Gradients(dq, dk, dv, own_k, own_v, dbias, down_bias)
