"""Heads pooled by the mean project N/s tokens instead of N, and compute the same."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nn.layers import MASKS, E, H, L, N, make, reference_of
from primaldual import MultiheadAttention, Primal, mechanism
from primaldual.nn import ConvProjection
from primaldual.primal import DepthwiseConv1d, Pooled

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
POOLED = {
    "default scales": mechanism("sh"),
    "apart": mechanism("sh", scales=(2, 1, 2, 1)),
    "all pooled": mechanism("sh", scales=(3, 2, 2, 3)),
    "longer than the sequence": mechanism("sh", scales=(20, 1, 2, 20)),
    "prefix": mechanism("bn+sh", scales=(2, 1, 2, 4), prefix=2),
    "grid": mechanism("bn+sh", scales=(2, 1, 2, 1), grid=(3, 3)),
    "learned beta": mechanism("bn+sh", learnable=True, scales=(2, 1, 2, 4)),
    "full": mechanism("bn+sh", full=True, learnable=True, scales=(2, 1, 2, 4)),
    "linear": mechanism("linear-bn+sh", scales=(2, 1, 2, 4)),
    "bias and residual": Primal(training_set=Pooled((2, 1, 2, 4)), bias=True, residual=True),
}
KINDS = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim and vdim": {"kdim": 5, "vdim": 7},
    "shared": {"projection": "shared"},
}


def projection_flops(layer: MultiheadAttention, *given: Tensor, **call) -> int:
    """What the matrix products of the projections cost: the only ones with a bias."""
    with FlopCounterMode(display=False) as counter:
        layer(*given, need_weights=False, **call)
    return counter.get_flop_counts()["Global"][torch.ops.aten.addmm]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("primal", POOLED.values(), ids=POOLED)
def test_pooling_before_the_projection_gives_the_reference_and_its_gradients(primal, kind, mask):
    layer = make(primal, **kind)
    slow = reference_of(layer)
    x = torch.randn(N, 4 if "kdim" in kind else L, E, dtype=torch.float64, requires_grad=True)
    key, value = (x, x)
    if "kdim" in kind:
        key, value = (torch.randn(N, L, size, dtype=torch.float64, requires_grad=True) for size in (5, 7))
    out, expected = (m(x, key, value, key_padding_mask=mask, need_weights=False)[0] for m in (layer, slow))
    torch.testing.assert_close(out, expected, **CLOSE)
    distinct = [x] if key is x else [x, key, value]
    found, wanted = (
        torch.autograd.grad(o.square().sum(), [*distinct, *m.parameters()]) for o, m in ((out, layer), (expected, slow))
    )
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_values_apart_from_keys_are_pooled_on_their_own():
    layer, x = make("sh"), torch.randn(N, L, E, dtype=torch.float64)
    value = torch.randn(N, L, E, dtype=torch.float64)
    for mask in MASKS.values():
        out, expected = (
            m(x, x, value, key_padding_mask=mask, need_weights=False)[0] for m in (layer, reference_of(layer))
        )
        torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("scales", [(1, 1, 2, 2), (2, 1, 2, 1), (4, 4, 4, 4), (3, 3, 1, 1)], ids=str)
def test_a_head_pooled_by_s_projects_as_many_tokens_as_it_has_windows(scales):
    length = 24
    layer = make(mechanism("sh", scales=scales))
    x = torch.randn(N, length, E, dtype=torch.float64)
    whole = 2 * N * length * E * E  # the query projection, and that of the output
    pooled_tokens = sum(length // s for s in scales)
    expected = 2 * whole + 2 * (2 * N * pooled_tokens * E * (E // H))
    assert projection_flops(layer, x, x, x) == expected
    assert projection_flops(reference_of(layer), x, x, x) == 4 * whole


def test_fewer_flops_in_all_than_the_reference():
    layer, x = make("sh"), torch.randn(N, 24, E, dtype=torch.float64)
    totals = []
    for each in (layer, reference_of(layer)):
        with FlopCounterMode(display=False) as counter:
            each(x, x, x, need_weights=False)
        totals.append(counter.get_total_flops())
    assert totals[0] < 0.8 * totals[1]


@pytest.mark.parametrize(
    ("primal", "kind", "call", "rewritten"),
    [
        (mechanism("sh"), {}, {}, True),
        (mechanism("linear-bn+sh"), {}, {}, True),
        (mechanism("sh"), {"impl": "reference"}, {}, False),
        (mechanism("sh"), {"projection": ConvProjection(3, dims=1)}, {}, False),
        (mechanism("sh", scales=(1, 1, 1, 1)), {}, {}, False),
        (mechanism("sh", how="max"), {}, {}, False),
        (mechanism("sh", how="conv"), {}, {}, False),
        (mechanism("sh", how="kmeans"), {}, {}, False),
        (Primal(inputs=(DepthwiseConv1d(3),), training_set=Pooled()), {}, {}, False),
        (mechanism("softmax"), {}, {}, False),
        (mechanism("sh"), {}, {"is_causal": True}, False),
        (mechanism("sh"), {}, {"need_weights": True}, False),
    ],
    ids=[
        "mean", "linear", "reference", "convolutional projection", "scales of 1", "max", "conv", "kmeans",
        "convolved tokens", "not pooled", "causal", "weights",
    ],
)  # fmt: skip
def test_the_rewrite_is_for_the_mean_and_an_affine_projection_only(primal, kind, call, rewritten):
    layer, x = make(primal, **kind), torch.randn(N, L, E, dtype=torch.float64)
    call = {"need_weights": False} | call
    out = layer(x, x, x, **call)[0]
    assert layer.plan(x, **call).route == ("pooled" if rewritten else "separate")
    torch.testing.assert_close(out, reference_of(layer)(x, x, x, **call)[0], **CLOSE)


def test_an_explicit_executor_runs_the_pooled_heads():
    x = torch.randn(N, L, E, dtype=torch.float64)
    sdpa = make("sh", impl="sdpa")
    torch.testing.assert_close(
        sdpa(x, x, x, need_weights=False)[0], reference_of(sdpa)(x, x, x, need_weights=False)[0], **CLOSE
    )
    with pytest.raises(ValueError, match="impl='linear' cannot compute this"):
        make("sh", impl="linear")(x, x, x, need_weights=False)
