"""Layers on a CUDA device in bfloat16, on every route, eager and captured, against the reference in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn

from primaldual import MultiheadAttention, mechanism
from primaldual.kernels.cudnn import beside as parallel
from primaldual.ops import UnsupportedError
from support.battery import relative_error
from support.rounding import rounded_at_every_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

E, H = 256, 4
LAYERS = {
    "bn": mechanism("bn"),
    "bn, learned": mechanism("bn", beta=0.5, learnable=True),
    "sh": mechanism("sh", scales=(1, 2, 4, 8)),
    "bn+sh": mechanism("bn+sh", scales=(1, 1, 2, 8)),
    "bn+sh, learned, apart": mechanism("bn+sh", beta=0.5, learnable=True, scales=(3, 1, 3, 2)),
    "all pooled": mechanism("bn+sh", scales=(2, 2, 4, 4)),
}


def make(name: str) -> MultiheadAttention:
    """A layer in bfloat16, with random parameters."""
    torch.manual_seed(0)
    layer = MultiheadAttention(E, H, batch_first=True, mechanism=LAYERS[name], device="cuda", dtype=torch.bfloat16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.01, std=E**-0.5)
    return layer


def step(layer: MultiheadAttention, x: Tensor, up: Tensor, padding: Tensor | None = None) -> dict[str, Tensor]:
    """The output and the gradients of the input and of every parameter."""
    out = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"out": out} | dict(zip(names, torch.autograd.grad(out, [x, *layer.parameters()], up), strict=True))


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    x, up = (torch.randn(batch, length, E, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return (x + 0.5).requires_grad_(), up


def references(layer: MultiheadAttention, x: Tensor, up: Tensor, padding: Tensor | None = None) -> tuple[dict, dict]:
    """Truth in float64, and the reference in bfloat16, whose error is the budget."""
    slow = copy.deepcopy(layer)
    slow.impl = "reference"
    with rounded_at_every_step():
        rough = step(slow, x, up, padding)
    return step(slow.double(), x.detach().double().requires_grad_(), up.double(), padding), rough


def assert_within(found: dict, truth: dict, rough: dict) -> None:
    for what, value in truth.items():
        # where the exact value is nearly zero (the key bias of softmax) only the size of its neighbours tells
        budget = 2 * relative_error(rough[what], value) + 8 * torch.finfo(torch.bfloat16).eps
        assert relative_error(found[what], value) < budget, what


@pytest.mark.parametrize("way", ["auto", "grouped_mixed", "grouped", "unpooled", "pooled"])
@pytest.mark.parametrize("length", [128, 1000, 2048])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_stays_within_twice_the_references_own_error(name, length, way, monkeypatch):
    if way != "auto":
        if not name.endswith(("sh", "pooled", "apart")):
            pytest.skip("one route")
        if way == "grouped_mixed":
            if name.endswith("apart"):
                pytest.skip("cuDNN's kernels take groups that stand side by side")
            for setting in ("QUERIES", "POINTS"):
                monkeypatch.setattr(parallel, setting, 100)
    layer = make(name)
    layer.impl = way
    x, up = inputs(2, length)
    if (name, length, way) == ("all pooled", 128, "grouped_mixed"):
        with pytest.raises(UnsupportedError, match="no head is long enough"):
            step(layer, x, up)
        return
    assert_within(step(layer, x, up), *references(layer, x, up))


@pytest.mark.parametrize("name", ["bn", "bn, learned", "bn+sh"])
def test_padding_and_a_row_without_keys(name):
    layer, (x, up) = make(name), inputs(3, 1100)
    padding = torch.arange(1100, device="cuda") >= torch.tensor([[1100], [700], [0]], device="cuda")
    found = step(layer, x, up, padding)
    assert_within(found, *references(layer, x, up, padding))


@pytest.mark.parametrize("way", ["auto", "grouped"])
@pytest.mark.parametrize("length", [128, 1000, 2048])
@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_step_is_the_eager_one(name, length, way):
    if way != "auto" and not name.endswith(("sh", "pooled", "apart")):
        pytest.skip("one route")
    layer, (x, up) = make(name), inputs(2, length)
    layer.impl = way
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, x, up)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x, up)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert_within(captured, *references(layer, x, up))


@pytest.mark.parametrize("name", ["bn", "sh", "bn+sh"])
def test_autocast_trains(name):
    layer = make(name).float()
    x = torch.randn(2, 128, E, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = layer(x, x, x, need_weights=False)[0]
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in (x, *layer.parameters()))


@pytest.mark.parametrize("name", ["bn", "sh", "bn+sh"])
def test_evaluation_is_what_training_computes(name):
    layer, (x, _) = make(name), inputs(2, 2048)
    with torch.no_grad():
        inferred = layer(x, x, x, need_weights=False)[0]
    assert relative_error(inferred, layer(x, x, x, need_weights=False)[0].double()) < 4 * torch.finfo(x.dtype).eps
