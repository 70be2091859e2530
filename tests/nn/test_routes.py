"""The routes of a layer: which is taken, why, and that what the plan says is what runs."""

from importlib import import_module

import pytest
import torch

from nn.layers import E, L, N, make, reference_of
from primaldual import MultiheadAttention, mechanism
from primaldual.kernels import launching
from primaldual.kernels.cudnn import attention as cudnn
from primaldual.kernels.native import library as native
from primaldual.ops import UnsupportedError, estimates
from primaldual.ops.devices import H200
from primaldual.ops.layer import ROUTES, costs, plan, problem

x = torch.randn(N, L, E, dtype=torch.float64)

CALLS = {
    "softmax": ("softmax", {}, "separate"),
    "bn": ("bn", {}, "recentred_projection"),
    "sh": ("sh", {}, "pooled"),
    "sh, padded": ("sh", {"key_padding_mask": torch.zeros(N, L, dtype=torch.bool)}, "pooled"),
    "sh, causal": ("sh", {"is_causal": True}, "separate"),
    "linear": ("linear", {}, "separate"),
    "weights": ("bn", {"need_weights": True}, "separate"),
}


@pytest.mark.parametrize(("name", "call", "route"), CALLS.values(), ids=CALLS)
def test_what_the_plan_says_is_what_runs(name, call, route, monkeypatch):
    layer, ran = make(name), []
    for known, module in ROUTES.items():
        run = module.run
        monkeypatch.setattr(module, "run", lambda *given, known=known, run=run: ran.append(known) or run(*given))
    call = {"need_weights": False} | call
    for _ in range(2):  # planned, then remembered
        layer(x, x, x, **call)
    assert ran == [layer.plan(x, **call).route] * 2 == [route] * 2


def test_an_explanation_says_why_and_what_each_route_would_take():
    text = make("bn+sh").plan(x).explain()
    lines = text.splitlines()
    assert lines[0].startswith("pooled: ") and "(separate)" in lines[0]
    assert all(any(line.startswith(f"  {route} ") for line in lines) for route in ROUTES)
    assert all(len(line) <= 80 for line in lines)
    assert "cannot: " in text and "FLOP" in text
    assert lines[-1] == "  estimated for float64, forward and backward, on a CPU"


def test_a_route_that_is_asked_for_is_taken_or_refused():
    layer = make("sh", impl="separate")
    assert layer.plan(x).route == "separate"
    torch.testing.assert_close(layer(x, x, x)[0], reference_of(layer)(x, x, x)[0])
    with pytest.raises(UnsupportedError, match=r"impl='grouped' cannot compute this layer: .* impl='auto' can"):
        make("linear", impl="grouped")(x, x, x)
    with pytest.raises(ValueError, match=r"impl must be one of auto, .*sdpa.*grouped.*; got 'quick'"):
        MultiheadAttention(E, 4, impl="quick")


def under_vmap(layer):
    return torch.func.vmap(lambda one: layer(one, one, one, need_weights=False)[0])(x.unsqueeze(1)).squeeze(1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_route_that_is_asked_for_is_taken_or_refused_where_nothing_can_be_planned(monkeypatch):
    layers, ran = [make("sh", impl=impl) for impl in ("auto", "separate", "pooled")], []
    expected = [reference_of(layer)(x, x, x)[0] for layer in layers]
    for known in ("pooled", "separate"):
        run = ROUTES[known].run
        monkeypatch.setattr(ROUTES[known], "run", lambda *given, known=known, run=run: ran.append(known) or run(*given))
    torch.testing.assert_close([under_vmap(layer) for layer in layers], expected)
    assert ran == ["pooled", "separate", "pooled"]
    with pytest.raises(UnsupportedError, match="impl='grouped' cannot compute this layer: "):
        under_vmap(make("sh", impl="grouped"))


SCALES = (1, 1, 2, 2, 4, 4, 8, 8)
SHAPES = {128: 32, 1024: 8, 2048: 8, 4096: 8, 8192: 4, 16384: 4}
"""Length and batch of the records, 8 heads of dimension 64."""

MEASURED = {  # on an H200: what was the fastest in docs/kernels.md
    ("bn+sh", "captured"): {128: "unpooled", 1024: "unpooled", 4096: "grouped_mixed", 16384: "grouped_mixed"},
    ("bn+sh", "compiled part"): {128: "unpooled", 1024: "unpooled", 4096: "grouped", 16384: "grouped_mixed"},
    ("bn", "captured"): dict.fromkeys(SHAPES, "recentred_projection"),
    ("bn", "compiled part"): {
        128: "unpooled", 1024: "unpooled", 2048: "unpooled", 4096: "recentred_projection",
        16384: "recentred_projection",
    },
}  # fmt: skip
RANKED = [(*case, length, route) for case, routes in MEASURED.items() for length, route in routes.items()]


@pytest.fixture
def an_h200(monkeypatch):
    """Plans as on an H200, which is not here."""
    for module in (estimates, costs, plan):
        monkeypatch.setattr(module, "device_of", lambda device: H200)
    monkeypatch.setattr(cudnn, "usable", lambda q, k, v: True)
    monkeypatch.setattr(launching, "on_cpu", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(("name", "mode", "length", "route"), RANKED)
def test_routes_are_ranked_as_measured(name, mode, length, route, an_h200):
    an_h200.setattr(problem, "captured", lambda x: mode == "captured")
    an_h200.setattr(import_module("primaldual.ops.plan"), "mode_of", lambda q: (True, mode == "captured"))
    an_h200.setattr(native, "library", lambda: None if mode == "captured" else object())
    scales = {"scales": SCALES} if name == "bn+sh" else {}
    layer = MultiheadAttention(
        512, 8, batch_first=True, mechanism=mechanism(name, **scales), dtype=torch.bfloat16, device="cpu"
    )
    inputs = torch.empty(SHAPES[length], length, 512, dtype=torch.bfloat16)
    assert layer.plan(inputs).route == route
