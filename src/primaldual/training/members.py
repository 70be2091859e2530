"""`SeriesTransformer` for many members at once: a product per layer for all of them, few launches.

What has parameters is a batched product over members; what has none sees members as part of the batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import batch_norm, dropout, gelu, layer_norm, pad

from ..kernels import encoder as fused
from ..kernels.buffers import side_by_side
from ..ops import attention
from ..primal import AllKeys, InputMap, Moments, PointMap, Primal, Sparse, TokenMap
from .stacked import Stacked


def forward(weights: Stacked, series: Tensor, padding: Tensor | None, training: bool) -> Tensor:
    """Scores [members, batch, classes], or predictions [members, batch] for regression.

    Args:
        weights: of the members.
        series: [members, batch, length, channels], 0 at padded steps; there may be more channels than the model has.
        padding: [members, batch, length], True at padded steps.
        training: whether dropout and batch statistics are on.
    """
    return (_Fused if weights.fused else _Pass)(weights, padding, training).run(series)


class _Pass:
    """One pass through the model. Activations are [members, batch·length, d_model]."""

    def __init__(self, weights: Stacked, padding: Tensor | None, training: bool) -> None:
        self.weights, self.config, self.views = weights, weights.config, weights.views
        self.padding, self.training = padding, training

    def run(self, series: Tensor) -> Tensor:
        config = self.config
        _, batch, length, _ = series.shape
        x = series[..., : config.channels].flatten(1, 2)
        x = self.linear("embedding", x) * math.sqrt(config.d_model)
        x = (x.unflatten(1, (batch, length)) + self.views["positions"].unsqueeze(1)).flatten(1, 2)
        x = self.drop(x)
        for i in range(config.layers):
            x = self.block(f"layers.{i}", x, batch)
        if config.encoder == "flowformer":
            x = self.norm("norm", x)
        x = self.drop(gelu(x)).unflatten(1, (batch, length))
        if self.padding is not None:
            x = x.masked_fill(self.padding.unsqueeze(-1), 0.0)
        y = self.linear("head", x.flatten(2))
        return y.squeeze(-1) if config.task == "regression" else y

    def block(self, name: str, x: Tensor, batch: int) -> Tensor:
        attention = f"{name}.self_attn"
        projected = self.product(x, self.views[f"{attention}.in_proj_weight"], self.views[f"{attention}.in_proj_bias"])
        attended = self.linear(f"{attention}.out_proj", self.attend(attention, projected, batch))
        x = self.norm(f"{name}.norm1", x + self.drop(attended))
        hidden = self.drop(gelu(self.linear(f"{name}.linear1", x)))
        return self.norm(f"{name}.norm2", x + self.drop(self.linear(f"{name}.linear2", hidden)))

    def attend(self, name: str, projected: Tensor, batch: int) -> Tensor:
        """Self-attention of queries, keys and values side by side, [members, batch·length, d_model]."""
        config, heads = self.config, self.config.heads
        parts = (part.unflatten(1, (batch, -1)).unflatten(-1, (heads, -1)) for part in _Thirds.apply(projected))
        q, k, v = (part.transpose(2, 3) for part in parts)  # [members, batch, heads, length, head_dim]
        p = config.dropout if config.attention_dropout is None else config.attention_dropout
        mark, fixed = f"{name}.learned.", f"{name}.feature_"
        out = attend(
            q, k, v, config.mechanism, self.padding if config.encoder == "mvts" else None,  # type: ignore[arg-type]
            p if self.training else 0.0, config.impl,
            {n.removeprefix(mark): view for n, view in self.views.items() if n.startswith(mark)},
            {n.removeprefix(fixed): b[0] for n, b in self.weights.buffers.items() if n.startswith(fixed)},
        )  # fmt: skip
        if (bias := self.views.get(f"{name}.mechanism_bias")) is not None:
            out = out + bias[:, None, :, None]
        return out.transpose(2, 3).flatten(3).flatten(1, 2)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """[members, rows, in] to [members, rows, out]."""
        weight = self.views[f"{name}.weight"]
        return self.product(x.to(weight.dtype), weight, self.views[f"{name}.bias"])

    def product(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Batch norm, or layer norm, per member."""
        weight, bias = self.views[f"{name}.weight"], self.views[f"{name}.bias"]
        if self.config.encoder == "flowformer":
            normal = layer_norm(x, x.shape[-1:])
            return torch.addcmul(bias.unsqueeze(1).to(x.dtype), normal, weight.unsqueeze(1).to(x.dtype))
        mean, variance = (self.weights.buffers[f"{name}.running_{part}"] for part in ("mean", "var"))
        members = x.shape[0]
        flat = x.transpose(0, 1).flatten(1)  # a member's channel is a channel
        y = batch_norm(flat, mean.view(-1), variance.view(-1), weight.flatten(), bias.flatten(), self.training)
        return y.unflatten(1, (members, -1)).transpose(0, 1)

    def drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.config.dropout, self.training)


class _Fused(_Pass):
    """The same by the kernels of `fused`."""

    def __init__(self, weights: Stacked, padding: Tensor | None, training: bool) -> None:
        super().__init__(weights, None if padding is None else padding.contiguous(), training)
        self.sites = 0
        if training and self.config.dropout:
            limit, count = 2**31, 2 + 3 * self.config.layers
            self.seeds = torch.randint(-limit, limit, (count,), dtype=torch.int32, device=weights.matrix.device)

    def run(self, series: Tensor) -> Tensor:
        config, views = self.config, self.views
        _, batch, length, channels = series.shape
        weight = pad(views["embedding.weight"], (0, channels - config.channels))
        x = fused.linear(series.flatten(1, 2), weight)
        x = fused.embed(x, views["embedding.bias"], views["positions"], math.sqrt(config.d_model), self.site())
        for i in range(config.layers):
            x = self.block(f"layers.{i}", x, batch)
        if config.encoder == "flowformer":
            x = self.norm("norm", x)
        z = x.unflatten(1, (batch, length))
        y = fused.head(z, views["head.weight"], views["head.bias"], self.padding, self.site())
        return y.squeeze(-1) if config.task == "regression" else y

    def block(self, name: str, x: Tensor, batch: int) -> Tensor:
        attention = f"{name}.self_attn"
        projection = self.views[f"{attention}.in_proj_weight"], self.views[f"{attention}.in_proj_bias"]
        projected, x = fused.linear_beside(x, *projection)
        attended = self.attend(attention, projected, batch)
        x = fused.add_norm(
            x, attended, *self.of(f"{attention}.out_proj"), self.normal(f"{name}.norm1"), self.site(), self.training
        )
        first, second = self.of(f"{name}.linear1"), self.of(f"{name}.linear2")
        drops = self.site(), self.site()
        return fused.feed_forward(x, *first, *second, self.normal(f"{name}.norm2"), drops, self.training)

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        return self.views[f"{name}.weight"], self.views[f"{name}.bias"]

    def normal(self, name: str) -> fused.Norm:
        buffers = self.weights.buffers
        return fused.Norm(*self.of(name), buffers.get(f"{name}.running_mean"), buffers.get(f"{name}.running_var"))

    def site(self) -> fused.Dropout | None:
        """Dropout at the next place of the model."""
        if not (self.training and self.config.dropout):
            return None
        self.sites += 1
        return fused.Dropout(self.config.dropout, self.seeds[self.sites - 1 : self.sites])


class _Thirds(Function):
    """Thirds of [members, rows, 3 · width], views. Gradients that are thirds of one buffer are handed on as that."""

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


def attend(
    q: Tensor, k: Tensor, v: Tensor, primal: Primal, padding: Tensor | None, dropout_p: float, impl: str,
    learned: dict[str, Tensor], fixed: dict[str, Tensor],
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
    """
    before = _ahead(primal) if learned else ()
    for map_ in before:
        own = {name: learned.pop(name) for name in map_.learned(1, 1)}
        q, k = (_mapped(map_, x, own, padding) for x in (q, k))
    primal = replace(primal, inputs=primal.inputs[len(before) :])
    if learned:
        outputs = []
        for i in range(len(q)):
            parameters = {name: x[i] for name, x in learned.items()} | fixed
            hidden = None if padding is None else padding[i]
            outputs.append(_attention(q[i], k[i], v[i], primal, hidden, dropout_p, impl, parameters))
        return torch.stack(outputs)
    members, hidden = q.shape[0], None if padding is None else padding.flatten(0, 1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return _attention(q, k, v, primal, hidden, dropout_p, impl, fixed).unflatten(0, (members, -1))


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
    training_set = primal.training_set.over if isinstance(primal.training_set, Sparse) else primal.training_set
    for map_ in primal.inputs:
        if isinstance(map_, PointMap) and not (map_.needs == "nothing" and isinstance(training_set, AllKeys)):
            break
        chosen.append(map_)
    return tuple(chosen)


def _mapped(map_: InputMap, x: Tensor, own: dict[str, Tensor], padding: Tensor | None) -> Tensor:
    """An input map with each member's own tensors; maps of the sequence find zeros at hidden tokens."""
    if isinstance(map_, TokenMap):
        if padding is not None:
            x = x.masked_fill(padding[:, :, None, :, None], 0.0)
        return torch.vmap(map_.tokens)(x, own)
    assert isinstance(map_, PointMap)
    return torch.vmap(lambda x, own: map_.apply(x, Moments(None, None), own))(x, own)
