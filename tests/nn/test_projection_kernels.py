"""Layers on the Triton kernels of the projections and of ragged attention, against the reference.

They run in Triton's interpreter, which must be switched on before Triton is imported: in a child process that runs
this file. On a GPU they are tested as they are, in test_layers_gpu.
"""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from nn.layers import reference_of
from primaldual import MultiheadAttention, mechanism
from primaldual.kernels.cudnn import beside as parallel
from primaldual.kernels.projection import grouped, recentred, unpooled
from primaldual.primal import Pooled
from support.cudnn import stand_in
from support.interpreter import child_process, on_cpu

# numpy's, in the interpreter; what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:overflow encountered in exp2:RuntimeWarning"
)

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

E, H = 24, 4
LAYERS = {
    "bn": mechanism("bn"),
    "bn, learned beta": mechanism("bn", beta=0.5, learnable=True),
    "sh": mechanism("sh", scales=(1, 2, 4, 8)),
    "bn+sh": mechanism("bn+sh", beta=0.7, scales=(1, 1, 2, 4)),
    "learned beta, apart": mechanism("bn+sh", beta=0.5, learnable=True, scales=(3, 1, 3, 2)),
    "all pooled": mechanism("bn+sh", scales=(2, 2, 16, 20)),
    "one scale": mechanism("bn+sh", scales=(2, 2, 2, 2)),
}


test_the_kernels_in_the_interpreter = child_process(__file__)
test_more_of_them_in_the_interpreter = child_process(__file__, deep=True)


def gradients(layer: MultiheadAttention, x, padding) -> dict:
    """The output, and the gradients of the input and of every parameter."""
    out = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    up = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"out": out} | dict(zip(names, torch.autograd.grad(out, [x, *layer.parameters()], up), strict=True))


@on_cpu
@pytest.mark.parametrize("way", ["unpooled", "grouped"])
@pytest.mark.parametrize(
    ("length", "bias"),
    [(1, True), pytest.param(16, True, marks=pytest.mark.deep), (21, True),
     pytest.param(21, False, marks=pytest.mark.deep)],
    ids=["N1", "N16", "N21", "N21, no bias"],
)  # fmt: skip
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_the_kernels_is_the_reference(name, length, bias, way, monkeypatch):
    pooled = isinstance(LAYERS[name].training_set, Pooled)
    if way != "unpooled" and not pooled:
        pytest.skip("one route")
    for module in (recentred, grouped):
        monkeypatch.setattr(module, "BLOCK", 8)  # so that there are several
    route = way if pooled else "recentred_projection"
    layer = MultiheadAttention(E, H, bias=bias, batch_first=True, mechanism=LAYERS[name], impl=route)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    slow = reference_of(layer).double()
    x = torch.randn(3, length, E, requires_grad=True)
    paddings = [None]
    if name.startswith("bn,") and bias:
        monkeypatch.setattr(recentred, "WHOLE", 8)  # in chunks
        monkeypatch.setattr(recentred, "CHUNK", 5)
        paddings += [torch.arange(length) >= torch.tensor([[length], [0], [1]])]
    for padding in paddings:
        found, expected = gradients(layer, x, padding), gradients(slow, x.detach().double().requires_grad_(), padding)
        largest = max(float(value.detach().abs().max()) for value in expected.values())
        for what, value in expected.items():
            assert (found[what] - value).abs().max() < 1e-5 * largest, what


@on_cpu
@pytest.mark.parametrize(
    ("name", "length", "long"),
    [
        ("sh", 21, [21, 11]),
        ("sh", 16, [16, 4]),
        ("bn+sh", 21, [11]),
        ("bn+sh", 16, [16, 8, 4]),
        ("all pooled", 21, [2, 2]),
    ],
)
def test_long_heads_go_back_beside_the_others(name, length, long, monkeypatch):
    seen = stand_in(monkeypatch, long)
    layer = MultiheadAttention(E, H, batch_first=True, mechanism=LAYERS[name], impl="grouped_mixed")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    slow = reference_of(layer).double()
    x = torch.randn(3, length, E, requires_grad=True)
    found, expected = gradients(layer, x, None), gradients(slow, x.detach().double().requires_grad_(), None)
    assert seen == long
    largest = max(float(value.detach().abs().max()) for value in expected.values())
    for what, value in expected.items():
        assert (found[what] - value).abs().max() < 1e-5 * largest, what


@on_cpu
@pytest.mark.parametrize("frozen", ["x", "in_proj_weight", "in_proj_bias", "learned.beta"])
def test_what_is_frozen_changes_no_other_gradient(frozen):
    layer = MultiheadAttention(E, H, batch_first=True, mechanism=LAYERS["learned beta, apart"], impl="grouped")
    tensors = {"x": torch.randn(3, 21, E, requires_grad=True)} | dict(layer.named_parameters())
    expected = gradients(layer, tensors["x"], None)
    tensors[frozen].requires_grad_(False)
    layer(*[tensors["x"]] * 3, need_weights=False)[0].backward(torch.linspace(-1, 1, 3 * 21 * E).view(3, 21, E))
    assert tensors.pop(frozen).grad is None
    for what, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad, expected[what], rtol=1e-5, atol=1e-5)


@on_cpu
@pytest.mark.parametrize("way", ["unpooled", "grouped", "grouped_mixed"])
def test_the_way_back_can_be_taken_twice_and_inference_gives_the_same(way, monkeypatch):
    """Queries are re-centred where they lie, once: neither a second way back nor a second call finds them changed."""
    stand_in(monkeypatch, [21])
    layer = MultiheadAttention(E, H, batch_first=True, mechanism=LAYERS["bn+sh"], impl=way)
    x = torch.randn(3, 21, E, requires_grad=True)
    leaves = [x, *layer.parameters()]
    out = layer(x, x, x, need_weights=False)[0]
    first = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    if way != "grouped_mixed":  # which has no form without a way back
        with torch.no_grad():
            assert torch.equal(layer(x, x, x, need_weights=False)[0], out)
    again = layer(x, x, x, need_weights=False)[0]
    assert torch.equal(again, out)
    for one in (out, again):
        assert all(map(torch.equal, torch.autograd.grad(one.square().sum(), leaves), first))


def test_one_buffer_holds_all_that_is_attended_to():
    groups = grouped.Groups(((1, (1,)), (2, (0, 2)), (5, (3,))), 3, 21, H, E // H)
    flat = torch.arange(float(sum(groups.sizes)))
    queries = parallel.Queries(3, H, 21, E // H, groups.row).of(flat)
    seen = [queries]
    for head, points, scale, *places in grouped.layout(groups):
        assert points == -(-21 // scale) and groups.scales[head] == scale
        for offset, batch, row in (places[:3], places[3:]):
            seen.append(flat.as_strided((3, points, E // H), (batch, row, 1), offset))
    torch.testing.assert_close(torch.cat([x.flatten() for x in seen]).sort()[0], flat, rtol=0, atol=0)


@on_cpu
def test_gradients_of_tokens_are_handed_on_without_a_copy(monkeypatch):
    kept = []
    together = unpooled.together
    monkeypatch.setattr(unpooled, "together", lambda given: kept.append((given[0], together(given))) or kept[-1][1])
    layer = MultiheadAttention(E, H, batch_first=True, mechanism=LAYERS["bn+sh"], impl="unpooled")
    x = torch.randn(3, 21, E, requires_grad=True)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    [(dq, packed)] = kept
    assert packed.data_ptr() == dq.data_ptr()
    apart = tuple(part.clone() for part in packed.permute(2, 0, 3, 1, 4))
    torch.testing.assert_close(together(apart), packed, rtol=0, atol=0)


@on_cpu
def test_the_routes_drop_the_same_weights():
    layer = MultiheadAttention(E, H, dropout=0.5, batch_first=True, mechanism=LAYERS["bn+sh"])
    x, found = torch.randn(3, 16, E, requires_grad=True), []
    for layer.impl in ("unpooled", "grouped"):
        torch.manual_seed(0)
        found.append(gradients(layer, x, None))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    torch.manual_seed(1)
    assert (gradients(layer, x, None)["out"] - found[0]["out"]).abs().max() > 0.01
