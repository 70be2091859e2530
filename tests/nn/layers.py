"""The layers that the tests of this folder go through: every mechanism, and what composes of their parts."""

import copy

import pytest
import torch
from torch import nn

from primaldual import MultiheadAttention, Primal, mechanism, mechanisms
from primaldual.primal import (
    BatchNorm,
    DepthwiseConv1d,
    EluPlusOne,
    Fixed,
    Forget,
    Gated,
    KernelSum,
    Pooled,
    RandomFeatures,
    Recenter,
    RmsNorm,
    Rotary,
    Scale,
    Strided,
    Taylor,
    Unit,
    Window,
)

E, H, N, L = 16, 4, 2, 9

NAMED = {name: mechanism(name, **({"stride": 3} if name.startswith("sparse") else {})) for name in mechanisms()}
LAYERS = NAMED | {
    "learnable beta": mechanism("bn", beta=0.5, learnable=True),
    "learnable beta, apart scales": mechanism("bn+sh", beta=0.5, learnable=True, scales=(2, 1, 2, 1)),
    "full bn, learnable, pooled": mechanism("bn+sh", full=True, learnable=True, scales=(1, 3, 3, 2)),
    "linear full bn": mechanism("linear-bn", full=True, learnable=True),
    "linear, apart scales": mechanism("linear-bn+sh", scales=(4, 1, 4, 2), learnable=True),
    "sparse, apart scales": mechanism("sparse-bn+sh", scales=(2, 1, 2, 1), pattern=Strided(3), learnable=True),
    "sparse fixed": mechanism("sparse", pattern=Fixed(4, 2)),
    "sparse window": mechanism("sparse-sh", pattern=Window(1)),
    "all heads pooled": mechanism("sh", scales=(2, 2, 4, 4)),
    "pooled after a prefix": mechanism("sh", scales=(2, 1, 2, 1), prefix=1),
    "pooled over a grid": mechanism("bn+sh", scales=(2, 1, 2, 1), grid=(3, 3)),
    "max pooled": mechanism("sh", scales=(2, 1, 2, 3), how="max"),
    "conv pooled": mechanism("sh", scales=(2, 1, 2, 3), how="conv"),
    "clustered": mechanism("sh", scales=(2, 1, 2, 3), how="kmeans"),
    "convolved and pooled": Primal(inputs=(DepthwiseConv1d(4),), training_set=Pooled((2, 1, 2, 1))),
    "causal convolution": mechanism("conv1d", size=3, causal=True),
    "convolution of each channel, pooled": Primal(
        inputs=(DepthwiseConv1d(4, channels="each"),), training_set=Pooled((2, 1, 2, 1))
    ),
    "temperature": Primal(inputs=(RmsNorm(), Scale(1.5, learnable=True)), training_set=Pooled((2, 1, 2, 1))),
    "one temperature": Primal(inputs=(Scale(1.5, learnable=True, per_head=False),), training_set=Pooled((2, 1, 2, 1))),
    "rotary": mechanism("bn+sh", rotary=Rotary(7.0), scales=(2, 1, 2, 1)),
    "convolved, rotated, normalised": Primal(inputs=(DepthwiseConv1d(3, causal=True), Rotary(7.0, 0.5), RmsNorm())),
    "normalised, then recentred": Primal(inputs=(RmsNorm(), Recenter(0.5, learnable=True))),
    "taylor": mechanism("linear", features=Taylor(2)),
    "random features": mechanism("linear-sh", features=RandomFeatures(12), scales=(2, 1, 2, 1)),
    "unit": Primal(EluPlusOne(), Unit()),
    "gates of heads": mechanism("gate+sh", per="head", scales=(2, 1, 2, 1)),
    "a sink and gates": Primal(normalizer=Gated(KernelSum("learned"), "channel"), inputs=(Recenter(0.5),)),
    "decays and gates": Primal(
        normalizer=Gated(per="channel"), weights=Forget(), training_set=Pooled((2, 1, 2, 1)), inputs=(RmsNorm(),)
    ),
    "bias": Primal(inputs=(BatchNorm(),), bias=True),
    "residual": Primal(training_set=Pooled((1, 2, 2, 1)), residual=True, bias=True),
}

NOT_CAUSAL = {name for name, primal in LAYERS.items() if primal.causal_refusal(H)}
GRIDDED = {"conv2d", "pooled over a grid"}

MASKS = {
    "no mask": None,
    "bool padding": torch.arange(L) >= torch.tensor([[L], [5]]),
    "holes": (torch.arange(L) + torch.tensor([[0], [2]])) % 4 == 1,
    "float padding": torch.linspace(-1, 1, 2 * L, dtype=torch.float64)
    .view(2, L)
    .masked_fill(torch.arange(L) >= torch.tensor([[L], [5]]), -torch.inf),
}


def each(without: set[str] = frozenset()) -> pytest.MarkDecorator:
    """A test for each layer."""
    kept = {name: primal for name, primal in LAYERS.items() if name not in without}
    return pytest.mark.parametrize("primal", kept.values(), ids=kept)


def make(primal: Primal | str, **options) -> MultiheadAttention:
    """A layer whose every parameter is random, so that no identity at the start hides a mistake."""
    layer = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, mechanism=primal, **options)
    for name, parameter in layer.named_parameters():
        if name.startswith("learned"):
            nn.init.normal_(parameter, mean=0.5, std=0.3)
        else:
            nn.init.normal_(parameter, std=0.3)
    return layer


def reference_of(layer: MultiheadAttention) -> MultiheadAttention:
    slow = copy.deepcopy(layer)
    slow.impl = "reference"
    return slow
