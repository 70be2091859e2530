"""What the ragged kernels know of a sparse pattern: a few integers for each query and each point.

    query i keeps point j:   start_i ≤ j ≤ start_i + span   or   label_i = label_j

A band or a block of points is what is near, residue classes or summaries are what has a label. The integers of a head
are rows of one tensor: start, span; then, where some head has labels, those of the queries and those of the points.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..primal import Sparse
from ..primal.patterns import Band, Block, Pattern, Piece, Residues, Summary
from .problem import Problem

WIDTH = 256
"""Rows are as long as a multiple of this, and so of every block of the kernels."""

_FAR = 1 << 30
"""Where nothing is near, that starts beyond all points."""


def refusal(pattern: Pattern, length: int) -> str | None:
    """Why the integers cannot say what a pattern keeps; None when they can."""
    pieces = pattern.pieces(length)
    if pieces is None:
        return f"{pattern!r} does not say where the keys it keeps lie (Pattern.pieces)"
    near, labelled = _split(pieces)
    if len(near) > 1 or len(labelled) > 1 or not any(piece.own for piece in pieces):
        return f"the ragged kernel has one band or block and one label for a query, and {pattern!r} has others"
    return None


def marks(p: Problem) -> Tensor | None:
    """The integers of all heads, int32 [heads, 2 or 4, width], on the device; None where every query keeps all."""
    if not isinstance(p.primal.training_set, Sparse):
        return None
    key = _key(p)
    if torch.compiler.is_compiling():
        return _marks(*key)
    if key not in _held:
        if p.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "attention of this shape must run once, on a side stream, before it is captured in a graph"
            )
        with torch.inference_mode(False):  # what is first met in inference serves training later
            _held[key] = _marks(*key[:4], torch.device("cpu")).to(p.q.device)
    return _held[key]


def known(p: Problem) -> bool:
    """Whether they are on the device already: only then can a call be captured."""
    return not isinstance(p.primal.training_set, Sparse) or _key(p) in _held


_Key = tuple[Sparse, tuple[int, ...], int, int, torch.device]
_held: dict[_Key, Tensor] = {}
"""Kept for good: captured graphs read them."""


def _key(p: Problem) -> _Key:
    assert isinstance(p.primal.training_set, Sparse)
    return p.primal.training_set, p.scales, p.q.shape[2], p.k.shape[2], p.q.device


def _marks(sparse: Sparse, scales: tuple[int, ...], queries: int, tokens: int, device: torch.device) -> Tensor:
    most = max(sparse.points(scale, tokens) for scale in scales)
    width = -(-max(queries, most) // WIDTH) * WIDTH
    index = torch.arange(width, device=device)
    of_scale = {scale: _head(sparse, scale, tokens, index) for scale in sorted(set(scales))}
    found = torch.stack([of_scale[scale] for scale in scales]).int()
    labels = any(_split(sparse.pattern.pieces(sparse.points(scale, tokens)) or ())[1] for scale in scales)
    return found if labels else found[:, :2].contiguous()


def _head(sparse: Sparse, scale: int, tokens: int, index: Tensor) -> Tensor:
    """start, span, labels of queries, labels of points: [4, width]."""
    i = sparse.coordinate(index, scale, tokens)
    near, labelled = _split(sparse.pattern.pieces(sparse.points(scale, tokens)) or ())
    start, span = torch.full_like(i, _FAR), 0
    mine, theirs = torch.zeros_like(i), torch.full_like(i, -1)
    for piece in near:
        if isinstance(piece, Band):
            reach = min(piece.reach, _FAR // 2)
            start, span = i - reach, 2 * reach
        else:
            start, span = i // piece.size * piece.size, min(piece.size - 1, _FAR)
    for piece in labelled:
        if isinstance(piece, Residues):
            mine, theirs = i % piece.stride, index % piece.stride
        else:
            theirs = torch.where(index % piece.size >= piece.size - piece.count, 0, -1)
    return torch.stack([start, torch.full_like(i, span), mine, theirs])


def _split(pieces: tuple[Piece, ...]) -> tuple[list[Band | Block], list[Residues | Summary]]:
    near = [piece for piece in pieces if isinstance(piece, Band | Block)]
    return near, [piece for piece in pieces if isinstance(piece, Residues | Summary)]
