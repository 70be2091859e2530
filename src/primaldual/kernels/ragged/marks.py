"""What the ragged kernels know of a sparse pattern: two integers for each query, three for each head, all modulo 2³².

    query i keeps point j:   j − start_i ≤ span   or   j·step + phase_i ≤ phase_span

The first are the points of a band or of a block. For the second, the points go around a circle of 2³² places, once in
every `stride` points: step = ⌈2³²/stride⌉. Those of one residue class stand close together there, all others far away,
so that an arc holds a class, or the last few points of every block. No score costs a division.

The integers of a head are rows of one tensor: (span, step, phase_span), then start and, where circles are used, phase.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dual.form import pattern_of, pieces_of
from ...primal import TrainingSet
from ...primal.patterns import Band, Block, Pattern, Piece, Residues, Summary
from ..kept import on_device

WIDTH = 128
"""Rows are as long as a multiple of this, and so of every block of queries."""

_FAR = 1 << 30
"""Beyond all points."""


def refusal(pattern: Pattern, length: int, queries: int) -> str | None:
    """Why the integers cannot say what a pattern keeps of `length` points; None when they can."""
    pieces = pieces_of(pattern, length)
    if pieces is None:
        return f"{pattern!r} does not say where the keys it keeps lie (Pattern.pieces)"
    near, around = _split(pieces)
    summaries = [piece for piece in around if isinstance(piece, Summary)]
    alone = any(near != [Block(piece.size)] for piece in summaries)  # theirs are kept in the query's own block, too
    if len(near) > 1 or len(around) > 1 or alone or not any(piece.own for piece in pieces):
        return f"the ragged kernel has one band and one residue class, or blocks and their summaries, not {pattern!r}"
    most = max(length, queries)
    for piece in around:
        if 5 * most * min(_period(piece), most) >= 2**32:
            return f"the ragged kernel cannot tell residues modulo {_period(piece)} apart in sequences of {most}"
    return None


def marks(
    training_set: TrainingSet, scales: tuple[int, ...], queries: int, tokens: int, device: torch.device
) -> Tensor | None:
    """The integers of all heads, int32 [heads, 2 or 3, width], on the device; None where every query keeps all."""
    if pattern_of(training_set) is None:
        return None
    if torch.compiler.is_compiling():
        return _marks(training_set, scales, queries, tokens, device)
    return _kept_marks(training_set, scales, queries, tokens, device)


def has_marks(
    training_set: TrainingSet, scales: tuple[int, ...], queries: int, tokens: int, device: torch.device
) -> bool:
    """Whether they are on the device already: only then can a call be captured."""
    return pattern_of(training_set) is None or (training_set, scales, queries, tokens, device) in _kept_marks.kept


@on_device(most=256)
def _kept_marks(
    sparse: TrainingSet, scales: tuple[int, ...], queries: int, tokens: int, device: torch.device
) -> Tensor:  # fmt: skip
    return _marks(sparse, scales, queries, tokens, torch.device("cpu")).to(device)


def _marks(sparse: TrainingSet, scales: tuple[int, ...], queries: int, tokens: int, device: torch.device) -> Tensor:
    pattern = pattern_of(sparse)
    assert pattern is not None
    index = torch.arange(max(1, -(-queries // WIDTH)) * WIDTH, device=device)
    pieces = {scale: pieces_of(pattern, sparse.points(scale, tokens)) or () for scale in sorted(set(scales))}
    of_scale = {
        scale: _head(kept, sparse.coordinate(index, scale, tokens), max(queries, sparse.points(scale, tokens)))
        for scale, kept in pieces.items()
    }
    found = torch.stack([of_scale[scale] for scale in scales])
    rows = 3 if any(_split(kept)[1] for kept in pieces.values()) else 2
    return (found[:, :rows].add(2**31).remainder(2**32) - 2**31).int()  # as 32 bits, signed


def _head(pieces: tuple[Piece, ...], i: Tensor, most: int) -> Tensor:
    """(span, step, phase_span), start and phase of the queries at coordinates i: [3, width]."""
    start, span = torch.full_like(i, _FAR), 0
    phase, step, phase_span = torch.full_like(i, _FAR), 0, 0
    near, around = _split(pieces)
    for kept in near:
        if isinstance(kept, Band):
            reach = min(kept.reach, _FAR // 2)
            start, span = i - reach, 2 * reach
        else:
            start, span = i // kept.size * kept.size, min(kept.size - 1, _FAR)
    for piece in around:
        period = min(_period(piece), most)
        step, slack = -(-(2**32) // period), most + period
        if isinstance(piece, Residues):
            phase, phase_span = slack - i * step, 2 * slack
        elif piece.count < period:
            phase, phase_span = torch.full_like(i, (piece.count - period) * step), (piece.count - 1) * step + slack
        else:
            phase, step = torch.zeros_like(i), 0  # all points are kept
    numbers = torch.zeros_like(i)
    numbers[0], numbers[1], numbers[2] = span, step, phase_span
    return torch.stack([numbers, start, phase])


def _period(piece: Residues | Summary) -> int:
    return piece.stride if isinstance(piece, Residues) else piece.size


def _split(pieces: tuple[Piece, ...]) -> tuple[list[Band | Block], list[Residues | Summary]]:
    near = [piece for piece in pieces if isinstance(piece, Band | Block)]
    return near, [piece for piece in pieces if isinstance(piece, Residues | Summary)]
