"""One call of an attention layer, stated before its inputs are projected."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ...dual import Form, form_of
from ...kernels.launching import captured, traced
from ...kernels.native import library as native
from ...kernels.projection.recentred import as_linear
from ...primal import Primal
from ...primal.features import Parameters
from ..plan import EXECUTORS


class Layer(Protocol):
    """What a layer says of itself: its primal, its heads, and the affine maps of its inputs."""

    primal: Primal
    num_heads: int
    num_kv_heads: int
    head_dim: int
    impl: str
    scale: float | None
    left_padding: bool
    convolutions: nn.ModuleDict | None

    @property
    def packed(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [3E, E] and bias [3E] of queries, keys and values, where one product gives them all; else None."""
        ...

    def weights_of(self, part: Literal["q", "k", "v"]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of one projection."""
        ...

    def project(
        self, x: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, query_padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, L, E], keys and values [N, L, num_kv_heads·head_dim]."""
        ...


class Squash(NamedTuple):
    """An affine map of inputs [N, L, E], whose sigmoid is a gate for each head or for each channel."""

    weight: Tensor  # [heads or heads·head_dim, E]
    bias: Tensor | None


class LayerProblem(NamedTuple):
    """A layer and what it was called with. In self-attention x, key and value are one tensor."""

    layer: Layer
    x: Tensor  # [N, L, E]
    key: Tensor  # [N, S, kdim]
    value: Tensor  # [N, S, vdim]
    padding: Tensor | None  # [N, S]
    query_padding: Tensor | None  # [N, L]
    mask: Tensor | None  # [L, S] or [N or 1, heads or 1, L, S]
    is_causal: bool
    dropout_p: float
    parameters: Parameters
    need_weights: bool
    extra_keys: Tensor | None = None  # [1, n, E], beside the projected ones; no mask hides them
    extra_values: Tensor | None = None
    query_offset: int = 0
    gate: Tensor | None = None  # [N, heads, L, 1 or head_dim], what the outputs are multiplied by, whatever the route
    squash: Squash | None = None  # or what of the queries' inputs the gate is the sigmoid of

    @property
    def primal(self) -> Primal:
        """What the heads of every route compute: what the layer states, but for a gate on the outputs."""
        return self.layer.primal.ungated

    @property
    def form(self) -> Form:
        """What a route may take it for."""
        return form_of(self.primal)

    @property
    def scales(self) -> tuple[int, ...]:
        """The scale of every head."""
        return self.primal.training_set.head_scales(self.layer.num_heads)

    @property
    def one_input(self) -> bool:
        """Whether queries, keys and values come of one tensor."""
        return self.x is self.key and self.key is self.value

    @property
    def trains(self) -> bool:
        """Whether gradients are kept."""
        weight, _ = self.layer.weights_of("q")
        return torch.is_grad_enabled() and (self.x.requires_grad or weight.requires_grad)

    @property
    def executor(self) -> str:
        """The executor that the layer asks for; a layer that asks for a route leaves it open."""
        return self.layer.impl if self.layer.impl in EXECUTORS else "auto"

    @property
    def dtype(self) -> torch.dtype:
        """What the products compute in."""
        kind = self.x.device.type
        if self.x.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
            return self.x.dtype
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.x.dtype

    @property
    def captured(self) -> bool:
        """Whether the host's work is done once, into a graph."""
        return captured(self.x)

    def split(self, x: Tensor) -> Tensor:
        """[N, L, heads·dim] to [N, heads, L, dim]."""
        return x.unflatten(-1, (-1, self.layer.head_dim)).transpose(1, 2)

    def route_key(self) -> tuple[Any, ...]:
        """What the choice of a route depends on, beside the layer itself."""
        x = self.x
        return (
            self.layer.impl, x.shape, self.key.shape, self.value.shape, x is self.key, self.key is self.value,
            x.dtype, self.dtype, x.device, _dtype(self.padding), _dtype(self.mask), self.is_causal,
            self.dropout_p > 0, self.need_weights, self.query_offset, self.extra_keys is None, self.trains,
            self.captured, operators_watched(), native.library() is None,
        )  # fmt: skip


def _dtype(mask: Tensor | None) -> torch.dtype | None:
    return None if mask is None else mask.dtype


def operators_watched() -> bool:
    """Whether something but autograd looks at the operators: a compiler, a FLOP counter, a transform."""
    return traced() or forward_ad._current_level >= 0


def packed(p: LayerProblem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, weight and bias of the packed projection, cast as autocast asks."""
    assert p.layer.packed is not None
    return as_linear(p.x, *p.layer.packed)


def queries_differ(p: LayerProblem) -> str | None:
    """Why not every query sees the same keys, in outputs alone; None where it does."""
    if p.need_weights:
        return "the weights are asked for"
    if p.is_causal or p.mask is not None:
        return "every query has its own keys"
    if p.extra_keys is not None:
        return "there are keys that are not projected"
    return None


def no_projection_kernel(p: LayerProblem) -> str | None:
    """Why the kernels of the projections cannot take this call; None where they can."""
    if operators_watched():
        return "a compiler, a counter or a transform looks at the operators"
    if p.layer.convolutions is not None:
        return "the projections are convolutional"
    if p.layer.scale is not None:
        return "the scores have a factor of their own"
    if p.layer.packed is None:
        return "queries, keys and values are not projected in one product"
    if not p.one_input:
        return "queries, keys and values do not come of one tensor"
    if p.x.is_meta or p.x.numel() == 0:
        return "the input is empty or has no data"
    return None
