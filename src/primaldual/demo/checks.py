"""The form that runs against the reference formula, on a layer of the demo's own model and real series."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..data import Dataset
from ..models import build
from ..nn import MultiheadAttention
from ..primal import Primal
from ..training import Recipe
from .settings import DemoError, model_config

TOLERANCE = 1e-9
SERIES = 8


class Check(NamedTuple):
    """Largest absolute differences in float64: of the output, and of the gradients in inputs and weights."""

    mechanism: str
    padded: bool
    output: float
    gradient: float


def check(name: str, primal: Primal, data: Dataset, recipe: Recipe) -> list[Check]:
    """Both forms of a mechanism, without padding and with a different padding in every row.

    Raises:
        DemoError: they differ by more than `TOLERANCE`.
    """
    model = build(model_config(recipe, data, primal), seed=0).double().eval()
    layer, x = _first_attention(model, data.test.x[:SERIES].double())
    length = x.shape[1]
    kept = torch.linspace(1, length, SERIES).round().long()
    padding = torch.arange(length) >= kept[:, None]  # True hides
    found = [_compare(name, layer, x, mask) for mask in (None, padding)]
    for one in found:
        # written so that NaN fails too
        if not (one.output <= TOLERANCE and one.gradient <= TOLERANCE):
            raise DemoError(f"{name} differs from its reference: {one}. Please report this as a bug.")
    return found


@torch.no_grad()
def _first_attention(model: nn.Module, series: Tensor) -> tuple[MultiheadAttention, Tensor]:
    """The first attention layer of a model, with what it sees of the series."""
    layer = next(module for module in model.modules() if isinstance(module, MultiheadAttention))
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    model(series)
    hook.remove()
    return layer, seen[0]


def _compare(name: str, layer: MultiheadAttention, inputs: Tensor, padding: Tensor | None) -> Check:
    probe = torch.randn(inputs.shape, dtype=inputs.dtype, generator=torch.Generator().manual_seed(0))
    fast, exact = (_outcome(layer, impl, inputs, padding, probe) for impl in ("auto", "reference"))
    output, *gradients = (float((a - b).abs().max()) for a, b in zip(fast, exact, strict=True))
    return Check(name, padding is not None, output, max(gradients))


def _outcome(
    layer: MultiheadAttention, impl: str, inputs: Tensor, padding: Tensor | None, probe: Tensor
) -> list[Tensor]:
    """The output, then the gradients in the inputs and in every weight of the layer."""
    x = inputs.clone().requires_grad_()
    layer.impl = impl
    output, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    return [output.detach(), *torch.autograd.grad((output * probe).sum(), [x, *layer.parameters()])]
