"""Attention of many members at once, each with what it has learned of its own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..base.randomness import DrawingFrom
from ..dual import form_of
from ..kernels.buffers import side_by_side
from ..models import SequenceConfig, SeriesConfig
from ..ops import attention
from ..primal import InputMap, Moments, PerToken, PointMap, PositionMap, Primal, TokenMap
from .stacked import Stacked


class SideBySide(Function):
    """Queries, keys and values from [members, rows, 3 · width], where they lie side by side, as views.

    Gradients that lie side by side in one buffer are handed on as that buffer: nothing is put together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(3, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first = gradients[0]
        members, rows, width = first.shape
        strides = 3 * rows * width, 3 * width, 1
        if not torch.is_grad_enabled() and side_by_side(gradients, strides, width):
            return first.as_strided((members, rows, 3 * width), strides)
        return torch.cat(gradients, -1)


def attend_in_layer(
    config: SeriesConfig | SequenceConfig, weights: Stacked, name: str, projected: Tensor, padding: Tensor | None,
    batch: int, training: bool, inputs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Self-attention of queries, keys and values side by side, [members, batch · length, d_model].

    Args:
        name: of the attention module.
        projected: [members, batch · length, 3 · d_model].
        padding: [members, batch, length], what is hidden from attention.
        inputs: of the layer, [members, batch · length, d_model], where the mechanism has numbers that are made of them.
    """
    heads = config.heads
    parts = (part.unflatten(1, (batch, -1)).unflatten(-1, (heads, -1)) for part in SideBySide.apply(projected))
    q, k, v = (part.transpose(2, 3) for part in parts)  # [members, batch, heads, length, head_dim]
    p = config.dropout if config.attention_dropout is None else config.attention_dropout
    learned, fixed = f"{name}.learned.", f"{name}.feature_"
    assert isinstance(config.mechanism, Primal)
    drops = training and p > 0.0
    with DrawingFrom(weights.generator) if drops and q.device.type == "cpu" else nullcontext():
        out = attend(
            q, k, v, config.mechanism, padding, p if drops else 0.0, config.impl,
            {n.removeprefix(learned): x for n, x in weights.parameters.items() if n.startswith(learned)},
            {n.removeprefix(fixed): x[0] for n, x in weights.buffers.items() if n.startswith(fixed)},
            _made(config.mechanism.made(heads, q.shape[-1]), weights, f"{name}.made", inputs, batch),
        )  # fmt: skip
    if (bias := weights.parameters.get(f"{name}.mechanism_bias")) is not None:
        out = out + bias[:, None, :, None]
    return out.transpose(2, 3).flatten(3).flatten(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, primal: Primal, padding: Tensor | None, dropout_p: float, impl: str,
    learned: dict[str, Tensor], fixed: dict[str, Tensor], made: dict[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """`attention` of [members, batch, heads, length, head_dim], with each member's own learned tensors.

    Members are folded into the batch. Input maps with learned tensors act on queries and keys alone, and are applied
    to each member before that; where they cannot be (they need the statistics of pooled keys), members run in turn.

    Args:
        q, k, v: queries, keys and values.
        primal: the mechanism.
        padding: [members, batch, length].
        dropout_p: on the weights.
        impl: the executor.
        learned: by name, [members, …].
        fixed: tensors of the features, the same for all members.
        made: numbers for every token, by name, [members, batch, heads, length, …].
    """
    made = made or {}
    before = _ahead(primal) if learned else ()
    for map_ in before:
        own = {name: learned.pop(name) for name in map_.learned(1, 1)}
        q, k = (_mapped(map_, x, own, padding) for x in (q, k))
    primal = replace(primal, inputs=primal.inputs[len(before) :])
    if learned:
        outputs = []
        for i in range(len(q)):
            parameters = {name: x[i] for name, x in (learned | made).items()} | fixed
            hidden = None if padding is None else padding[i]
            outputs.append(_attention(q[i], k[i], v[i], primal, hidden, dropout_p, impl, parameters))
        return torch.stack(outputs)
    members, hidden = q.shape[0], None if padding is None else padding.flatten(0, 1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    parameters = fixed | {name: x.flatten(0, 1) for name, x in made.items()}
    return _attention(q, k, v, primal, hidden, dropout_p, impl, parameters).unflatten(0, (members, -1))


def _made(
    parts: dict[str, PerToken], weights: Stacked, name: str, inputs: Tensor | None, batch: int
) -> dict[str, Tensor]:
    """What each member makes of the inputs, [members, batch, heads, length, …]."""
    found = {}
    for each, part in parts.items():
        assert inputs is not None
        weight, bias = (weights.parameters[f"{name}.{each}.{of}"] for of in ("weight", "bias"))
        affine = torch.baddbmm(bias.unsqueeze(1), inputs.to(weight.dtype), weight.transpose(1, 2))
        affine = affine.unflatten(1, (batch, -1)).unflatten(3, part.start.shape).movedim(3, 2)
        found[each] = part.function(affine)
    return found


def _attention(
    q: Tensor, k: Tensor, v: Tensor, primal: Primal, hidden: Tensor | None, dropout_p: float, impl: str,
    parameters: dict[str, Tensor],
) -> Tensor:  # fmt: skip
    out = attention(
        q, k, v, primal, key_padding_mask=hidden, query_padding_mask=hidden, dropout_p=dropout_p, impl=impl,
        parameters=parameters,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _ahead(primal: Primal) -> tuple[InputMap, ...]:
    """The first input maps that can be applied to tokens before everything else.

    Maps of the sequence can; maps of points as long as they need no statistics and the points are the tokens.
    """
    chosen: list[InputMap] = []
    points_are_tokens = form_of(primal).points == "tokens"
    for map_ in primal.inputs:
        if isinstance(map_, PointMap) and not (map_.needs == "nothing" and points_are_tokens):
            break
        chosen.append(map_)
    return tuple(chosen)


def _mapped(map_: InputMap, x: Tensor, own: dict[str, Tensor], padding: Tensor | None) -> Tensor:
    """An input map with each member's own tensors; maps that mix tokens find zeros at hidden ones."""
    if isinstance(map_, TokenMap):
        if padding is not None and not isinstance(map_, PositionMap):
            x = x.masked_fill(padding[:, :, None, :, None], 0.0)
        return torch.vmap(map_.tokens)(x, own)
    assert isinstance(map_, PointMap)
    return torch.vmap(lambda x, own: map_.apply(x, Moments(None, None), own))(x, own)
