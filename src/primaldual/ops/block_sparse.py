"""Sparse softmax heads that compute what they keep: the pieces of their pattern, by `gathered`.

On a GPU without dropout each piece is one FlexAttention, whose block mask follows from the piece's `Span` in O(tiles
kept) and is remembered; what padding hides is a bias on the scores, so no mask is built for it. Elsewhere, plain torch.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..dual import GroupHeadsByScale, KeepPattern, Rewrite, form_of
from ..dual.form import pieces_of, pooling_of
from ..kernels.kept import on_device
from ..primal import Sparse
from ..primal.patterns import Band, Block, Piece, Residues, Summary
from . import gathered, softmax
from .gathered import Laid, Part, Span, near_block, summary_columns
from .pooling import Pool
from .problem import Problem

TILE = 128
"""Queries and keys to a tile of FlexAttention: what it computes or skips as one."""

SMALLEST_HEAD = 16
"""FlexAttention's least head dimension; smaller heads are padded with zeros."""

DYNAMIC_SHAPES = True
"""One kernel for all lengths; otherwise one is compiled for every length of every piece."""

RECOMPILES = 64
"""Kernels kept: beyond torch's own limit of 8, FlexAttention would compute all N² scores without a word."""


class PatternCost(NamedTuple):
    """What the pieces of a problem cost forward."""

    flops: int
    pieces: int  # attentions run one after the other


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    training_set = problem.primal.training_set
    if type(training_set) is not Sparse:
        return "the training set is not Sparse: every query sees all keys"
    if reason := softmax.refusal(problem, "fused attention"):
        return reason
    if problem.query_offset:
        return f"its pieces are laid out from token 0 on, and the first query stands at token {problem.query_offset}"
    if problem.attn_hidden is not None:
        return "an attn_mask beside the pattern needs the dense mask"
    if form_of(problem.primal).points == "own":
        return f"{training_set.over!r} has points of its own"
    pooled = pooling_of(training_set)
    if pooled is not None and any(s > 1 for s in problem.scales):
        if pooled.prefix and problem.is_causal:
            return "causal windows after a prefix do not stand in equal blocks"
        if pooled.grid and problem.q.shape[2] > problem.k.shape[2]:
            return f"{problem.q.shape[2]} queries for a grid of {problem.k.shape[2]} keys"
    if pieces_of(training_set.pattern, problem.k.shape[2]) is None:
        return f"{training_set.pattern!r} does not say where the keys it keeps lie (Pattern.pieces)"
    return None


def estimate(problem: Problem) -> PatternCost:
    """Scores, FLOPs (2·B·H·L·columns·(D + Dv) for a group of heads) and pieces, as functions of shape."""
    training_set = problem.primal.training_set
    assert isinstance(training_set, Sparse)
    fused = _flex_runs(problem)
    batch, _, queries, dim = problem.q.shape
    tokens, both = problem.k.shape[2], dim + problem.v.shape[-1]
    flops = count = 0
    for scale, heads in GroupHeadsByScale.groups(problem.scales):
        length = training_set.points(scale, tokens)
        pieces = pieces_of(training_set.pattern, length) or ()
        per_score = 2 * batch * len(heads) * queries * both
        columns = sum(_columns(piece, length, scale, fused) for piece in pieces)
        flops, count = flops + per_score * columns, count + len(pieces)
    return PatternCost(flops, count)


def _columns(piece: Piece, length: int, scale: int, fused: bool) -> int:
    """Scores computed for a query: the kept ones, those beside them in a near block or, fused, in a tile."""
    tile = TILE if fused else 1
    match piece:
        case Band(reach):
            return (2 * -(-reach // tile) + 1) * tile if fused else 3 * near_block(piece)
        case Summary():
            return _up(summary_columns(piece, length), tile)
        case Residues(stride):
            columns = -(-length // min(stride, length))
        case Block(size):
            columns = min(size, length)
    rows = columns * scale
    return _up(columns, tile) * _up(rows, tile) // rows  # a class smaller than a tile still takes one


def _up(count: int, tile: int) -> int:
    return -(-count // tile) * tile


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (*softmax.one_sided_rewrites(problem), KeepPattern, GroupHeadsByScale)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    return problem.by_group(lambda p: (_attend(p), None))


def _flex_runs(p: Problem) -> bool:
    return p.q.is_cuda and p.dropout_p == 0 and p.q.dtype != torch.float64


def _attend(p: Problem) -> Tensor:
    training_set = p.primal.training_set
    assert isinstance(training_set, Sparse)
    pieces = pieces_of(training_set.pattern, training_set.points(p.scale, p.k.shape[2]))
    assert pieces is not None
    fused = _flex_runs(p)
    attend_piece = flex if fused else partial(gathered.dense, dropout_p=p.dropout_p)
    usual = p.relative_scale == 1.0  # pieces divide by √D
    if not p.is_causal:
        q, points, _ = softmax.one_sided(p)
        q = q if usual else q * p.relative_scale
        slot, per_key = _slots(p)
        if slot is None:
            return gathered.attend(q, points, None, pieces, per_key, None, attend_piece, not fused)
        length = training_set.points(p.scale, max(q.shape[2], p.k.shape[2]))
        query = slot.new_zeros(length * per_key).index_copy(0, slot, torch.arange(q.shape[2], device=q.device))
        q = q.index_select(2, query)  # slots that no query takes hold some query, and no one looks
        return gathered.attend(q, points, None, pieces, per_key, None, attend_piece, not fused).index_select(2, slot)
    queries, causal = softmax.one_sided_causal(p)
    q = queries.rows.flatten(2, 3)
    q = q if usual else q * p.relative_scale
    complete = Pool(causal.keys[:, :, :, -1], causal.values[:, :, :, -1], _last(causal.seen), _last(causal.bias))
    if p.scale == 1:
        return gathered.attend(q, complete, None, pieces, 1, 0, attend_piece, not fused)
    running = Pool(
        causal.keys.flatten(2, 3), causal.values.flatten(2, 3), _by_query(causal.seen), _by_query(causal.bias)
    )
    out = gathered.attend(q, complete, running, pieces, p.scale, 1, attend_piece, not fused, p.dropout_p)
    return out[:, :, : p.q.shape[2]]


def _slots(p: Problem) -> tuple[Tensor | None, int]:
    """Each query's slot, coordinate·per_key + place (None where that is its index), and per_key."""
    pooled = pooling_of(p.primal.training_set)
    if p.scale == 1 or pooled is None or not (pooled.prefix or pooled.grid):
        return None, p.scale
    per_key = p.scale * p.scale if pooled.grid else p.scale
    index = torch.arange(p.q.shape[2], device=p.q.device)
    coordinate, place = pooled.window(index, p.scale, p.k.shape[2])
    return coordinate * per_key + place, per_key


def _last(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[..., -1]


def _by_query(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten(2, 3)


def flex(laid: Laid) -> Part:
    """`gathered.dense` by FlexAttention, over the tiles that the span touches."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    query, keys, values = (_wide_enough(x) for x in (laid.q, laid.keys, laid.values))
    if query is not laid.q:  # it divides by the root of the padded dimension
        query = query * math.sqrt(SMALLEST_HEAD / laid.q.shape[-1])
    options: dict[str, Any] = {
        "score_mod": None if laid.bias is None else _biased(laid.bias),
        "block_mask": _block_mask(laid.span, laid.q.shape[2], laid.keys.shape[2], laid.q.device),
        "return_aux": AuxRequest(lse=True),
        # short pieces would get the kernel for decoding
        "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True},
    }
    if torch.compiler.is_compiling():
        out, aux = flex_attention(query, keys, values, **options)
    else:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            out, aux = _compiled_flex(DYNAMIC_SHAPES)(query, keys, values, **options)
    return out[..., : laid.values.shape[-1]], aux.lse


def _wide_enough(x: Tensor) -> Tensor:
    return x if x.shape[-1] >= SMALLEST_HEAD else pad(x, (0, SMALLEST_HEAD - x.shape[-1]))


@cache
def _compiled_flex(dynamic: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic)


def _biased(bias: Tensor) -> Any:
    """score + bias_j, per head where the bias is."""

    def shared(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, 0, j]

    def per_head(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, j]

    return shared if bias.shape[1] == 1 else per_head


def _block_mask(span: Span | None, rows: int, columns: int, device: torch.device) -> Any:
    if span is None:
        return None
    if torch.compiler.is_compiling():
        return build_block_mask(span, rows, columns, device)
    return _remembered(span, rows, columns, device)


@on_device(most=64, from_host=False)
def _remembered(span: Span, rows: int, columns: int, device: torch.device) -> Any:
    return build_block_mask(span, rows, columns, device)


def build_block_mask(span: Span, rows: int, columns: int, device: torch.device) -> Any:
    """The BlockMask of a span, without looking at the pairs: O(tiles kept)."""
    from torch.nn.attention.flex_attention import BlockMask

    # numbers on the device, so that kernels are not compiled anew for each of them
    per_row, per_column, low, high, hole = (torch.full((), x, dtype=torch.int32, device=device) for x in span)

    def kept(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        apart = i // per_row - j // per_column
        return (apart >= low) & (apart <= high) & (apart != hole)

    partial_kv, full_kv = tiles(span, rows, columns, device)
    partial_q, full_q = tiles(span.transposed(), columns, rows, device)
    return BlockMask(
        (rows, columns), *partial_kv, *full_kv, *partial_q, *full_q, BLOCK_SIZE=(TILE, TILE), mask_mod=kept
    )


def tiles(span: Span, rows: int, columns: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """For each tile of rows the tiles of columns that it sees in part, and those that it sees whole.

    With coordinates i₀..i₁ of the rows and j₀..j₁ of the columns, i − j takes every value of i₀ − j₁ .. i₁ − j₀: a tile
    is touched where that meets [low, high], and whole where it lies inside, without the hole. What is touched is an
    interval. Each answer is how many (int32 [1, 1, row tiles]) and which ([1, 1, row tiles, most]).
    """
    last = -(-columns // TILE) - 1
    extent = (TILE - 1) // span.per_row + 2 + min(span.high, columns) - max(span.low, -columns - rows)
    most = max(1, min(last + 1, extent * span.per_column // TILE + 2))
    start = torch.arange(0, rows, TILE, device=device)[:, None]
    stop = start + TILE
    first_i, last_i = start // span.per_row, (stop.clamp(max=rows) - 1) // span.per_row
    begin = ((first_i - span.high) * span.per_column // TILE).clamp(0, last)
    tile = begin + torch.arange(most, device=device)
    first_j, last_j = tile * TILE // span.per_column, ((tile + 1).mul(TILE).clamp(max=columns) - 1) // span.per_column
    lowest, highest = first_i - last_j, last_i - first_j
    touched = (tile <= last) & (highest >= span.low) & (lowest <= span.high)
    inside = (lowest >= span.low) & (highest <= span.high) & ((span.hole < lowest) | (span.hole > highest))
    whole = touched & inside & (stop <= rows) & ((tile + 1) * TILE <= columns)

    def listed(flag: Tensor) -> tuple[Tensor, Tensor]:
        order = (~flag).int().argsort(dim=1, stable=True)
        index = tile.clamp(max=last).gather(1, order)
        return flag.sum(1).int()[None, None], index.int()[None, None].contiguous()

    return listed(touched & ~whole), listed(whole)
