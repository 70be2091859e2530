"""How redundant the heads of a model are: distances between their attention maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..dual import form_of
from .calls import AttentionCall, attention_calls
from .distances import HeadDistances, LayerDistances
from .maps import AT_ONCE, Pooling, blocks, refusal


def head_distance(model: nn.Module, batch: Any) -> HeadDistances:
    """Measure how far apart the attention maps of the heads of each layer are; heads that are near do the same.

    The distance of heads g and h on a sequence is the L2 norm of the difference of their whole maps A [queries, keys],

        d_gh = √ Σ_ij (A_g,ij − A_h,ij)²,

    over the queries and keys that are not padding, so that it does not depend on what a sequence is batched with. It
    is no mean over the queries: it grows with the length, about as its root. Each sequence that a layer sees is a case
    (of a pair each of the two); d is averaged over cases, then over pairs of heads, then over layers.

    The map of a pooled head has a column for each window. For the difference it is given one for each token, in two
    ways, both reported:

    - shared: the window's weight is shared equally by its tokens, as the layer's `need_weights=True` has it. Rows sum
      to 1 as those of other heads do, but weights are spread out, and pooled heads come closer to each other. Max and
      conv pooling have no such weights, and no distances then.
    - repeated: each token has the whole weight of its window. Rows of a head of scale s then sum to s, so that heads of
      scales s and t that look everywhere alike are already |s − t| apart. It is nearer to what the paper seems to have
      done, where pooling brings heads further apart.

    Maps are made for a few cases and queries at a time, where the model is, in at least float32.

    Args:
        model: any module with `primaldual.MultiheadAttention` or `torch.nn.MultiheadAttention` layers in it. It runs
            once, in evaluation mode and without gradients, and is left as it was.
        batch: what the model is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments.

    >>> from primaldual import TransformerEncoderLayer
    >>> encoder = nn.TransformerEncoder(TransformerEncoderLayer(16, 2, mechanism="sh", batch_first=True), 2,
    ...                                 enable_nested_tensor=False)
    >>> found = head_distance(encoder, torch.randn(3, 10, 16))
    >>> [layer.layer for layer in found.layers]
    ['layers.0.self_attn', 'layers.1.self_attn']
    >>> found.repeated.mean > found.shared.mean
    True
    """
    calls = [call for call in attention_calls(model, batch, solved=True) if call.keys.shape[1] > 1]
    if not calls:
        raise ValueError(f"{type(model).__name__} has attention layers of one head only; a distance takes two")
    return HeadDistances(tuple(_layer(call) for call in calls))


def _layer(call: AttentionCall) -> LayerDistances:
    shared, repeated, reason = None, _distances(call, "repeated"), refusal(call)
    if form_of(call.primal).points == "tokens":
        shared = repeated
    elif reason is None:
        shared = _distances(call, "shared")
    if not len(repeated):
        raise ValueError(f"{call.layer}: no sequence of the batch has a token that is not padding")
    scales = call.primal.training_set.head_scales(call.keys.shape[1])
    return LayerDistances(call.layer, call.number, scales, shared, repeated, f"not shared: {reason}" if reason else "")


def _distances(call: AttentionCall, pooling: Pooling) -> Tensor:
    """[cases, H, H], in float64 on the CPU; cases of padding alone are left out."""
    cases, heads, queries = call.queries.shape[:3]
    together = max(1, AT_ONCE // max(1, heads * queries * call.keys.shape[2]))
    found = [torch.zeros(0, heads, heads, dtype=torch.float64)]
    for first in range(0, cases, together):
        part = slice(first, first + together)
        squares = torch.zeros(min(together, cases - first), heads, heads, dtype=torch.float64)
        tokens = torch.zeros(len(squares), dtype=torch.bool)
        for weights, valid in blocks(call, part, pooling):
            rows = weights.transpose(1, 2).contiguous()  # [cases, queries, H, S]
            # differences are taken, not products, which would cancel where heads are near
            distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
            squares += distances.square().masked_fill(~valid[..., None, None], 0.0).sum(1).cpu()
            tokens |= valid.any(1).cpu()
        found.append(squares.sqrt()[tokens])
    return torch.cat(found)
