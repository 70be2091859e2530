"""Re-centred and grouped projections: what a layer's shortcuts compute is what the reference does."""

from dataclasses import dataclass

import pytest
import torch
from torch.autograd import gradcheck

from nn.layers import E, H, N, make, reference_of
from primaldual import attention, mechanism
from primaldual.nn import ConvProjection
from primaldual.ops.layer import recentred_projection
from primaldual.primal import AllKeys, Pooled, Primal, Recenter, RmsNorm

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
BN = {"beta 1": mechanism("bn"), "beta": mechanism("bn", beta=0.3), "learned": mechanism("bn", learnable=True)}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("primal", BN.values(), ids=BN)
def test_the_recentred_projection_has_the_gradients_of_what_it_computes(primal, padded, bias):
    layer, x = make(primal, bias=bias), draw(3, 5, E)
    padding = torch.arange(5) >= torch.tensor([[5], [2], [0]]) if padded else None
    names = [name for name, _ in layer.named_parameters() if not name.startswith("out_proj")]

    def project(x, *parameters):
        for name, parameter in zip(names, parameters, strict=True):
            layer.get_submodule(name.rpartition(".")[0])._parameters[name.rpartition(".")[2]] = parameter
        return recentred_projection.project(layer.state(x, x, x, padding))

    assert gradcheck(project, (x, *(p.detach().requires_grad_() for n, p in layer.named_parameters() if n in names)))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("primal", BN.values(), ids=BN)
def test_recentred_queries_are_those_of_attention(primal, padded):
    layer, x = make(primal), draw(N, 7, E)
    padding = torch.arange(7) >= torch.tensor([[7], [3]]) if padded else None
    q, k, v = recentred_projection.project(layer.state(x, x, x, padding))
    plain = [layer.split(t) for t in layer.project(x, x, x, None, False)]
    for found, expected in zip((k, v), plain[1:], strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    seen = slice(None) if padding is None else slice(3)
    mean = plain[1][1, :, seen].mean(1)
    beta = layer.learned["beta"] if "beta" in layer.learned else torch.full((H,), primal.inputs[0].beta, dtype=x.dtype)
    torch.testing.assert_close(q[1], plain[0][1] - (beta[:, None] * mean)[:, None], **CLOSE)
    out = attention(q, k, v, "softmax", key_padding_mask=padding)
    parameters = dict(layer.learned.items())
    torch.testing.assert_close(out, attention(*plain, primal, key_padding_mask=padding, parameters=parameters), **CLOSE)


@pytest.mark.parametrize(
    ("primal", "kind", "call", "used"),
    [
        ("bn", {}, {}, True),
        ("bn", {"bias": False}, {}, True),
        ("softmax", {}, {}, False),
        (mechanism("bn", full=True), {}, {}, False),
        ("linear-bn", {}, {}, False),
        ("sparse-bn", {}, {}, False),
        (Primal(inputs=(RmsNorm(), Recenter())), {}, {}, False),
        ("bn", {"projection": "shared"}, {}, False),
        ("bn", {"projection": ConvProjection(3, dims=1)}, {}, False),
        ("bn", {"impl": "reference"}, {}, False),
        ("bn", {}, {"is_causal": True}, False),
        ("bn", {}, {"need_weights": True}, False),
        ("bn", {}, {"attn_mask": torch.zeros(7, 7, dtype=torch.bool)}, False),
    ],
    ids=[
        "bn", "no bias", "softmax", "full", "linear", "sparse", "normalised first", "shared", "convolutional",
        "reference", "causal", "weights", "mask",
    ],
)  # fmt: skip
def test_queries_are_recentred_in_the_projection_of_plain_self_attention(primal, kind, call, used):
    layer, x = make(primal, **kind), draw(N, 7, E)
    call = {"need_weights": False} | call
    out = layer(x, x, x, **call)[0]
    assert layer.plan(x, **call).route == ("recentred_projection" if used else "separate")
    torch.testing.assert_close(out, reference_of(layer)(x, x, x, **call)[0], **CLOSE)
    assert layer.plan(x, x.clone(), x, **call).route == "separate"


@pytest.mark.parametrize(
    "primal", ["bn", "sh", "bn+sh", mechanism("bn+sh", learnable=True)], ids=["bn", "sh", "bn+sh", "learned"]
)
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_parameters(primal):
    layer, x = make(primal).float(), torch.randn(N, 8, E, requires_grad=True)
    exact = layer(x, x, x, need_weights=False)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, x, x, need_weights=False)[0]
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all()
               for p in (x, *layer.parameters()))  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("primal", ["bn", "bn+sh"])
def test_transforms_take_the_plain_path(primal):
    layer, x = make(primal), torch.randn(N, 8, E, dtype=torch.float64)

    def run(x):
        return layer(x, x, x, need_weights=False)[0]

    expected = run(x)
    torch.testing.assert_close(torch.vmap(run)(x.unsqueeze(1)).squeeze(1), expected, **CLOSE)
    out, _ = torch.func.vjp(run, x)
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("primal", ["bn", "sh", "bn+sh"])
def test_frozen_parts_get_no_gradient_and_cost_none(primal):
    layer, x = make(primal), draw(N, 8, E)
    layer.in_proj_weight.requires_grad_(False)
    layer(x, x, x, need_weights=False)[0].square().sum().backward()
    assert layer.in_proj_weight.grad is None
    assert x.grad.abs().max() > 0
    assert layer.in_proj_bias.grad.abs().max() > 0


@dataclass(frozen=True)
class HalvedRecenter(Recenter):
    """x ↦ (x − βμ)/2"""

    def affine(self, moments, parameters):
        shift, _ = super().affine(moments, parameters)
        return shift, torch.full_like(shift, 0.5)


@dataclass(frozen=True)
class FirstHalf(AllKeys):
    """each query is fitted to the first half of the points"""

    def visible(self, scale, queries, tokens, device):
        return (torch.arange(self.points(scale, tokens), device=device) * 2 < tokens).expand(queries, -1)


OWN = {
    "map": Primal(inputs=(HalvedRecenter(),)),
    "map, pooled": Primal(inputs=(HalvedRecenter(0.3, learnable=True),), training_set=Pooled()),
    "training set": Primal(inputs=(Recenter(),), training_set=FirstHalf()),
}


@pytest.mark.parametrize("primal", OWN.values(), ids=OWN)
def test_a_part_of_the_users_own_is_computed_as_it_is_stated(primal):
    layer, x = make(primal), draw(N, 7, E)
    found, expected = (each(x, x, x, need_weights=False)[0] for each in (layer, reference_of(layer)))
    torch.testing.assert_close(found, expected, **CLOSE)
