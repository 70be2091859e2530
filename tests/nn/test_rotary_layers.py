"""Layers with rotary positions and gates on the Triton kernels, against the reference in float64.

They run in Triton's interpreter: in a child process that runs this file; and some of them on a GPU.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from nn.layers import reference_of
from primaldual import MultiheadAttention, mechanism
from primaldual.kernels.gate import gating
from primaldual.kernels.projection import turned as projection
from primaldual.kernels.rotary import turning
from primaldual.nn.made import MadeOfInput
from primaldual.ops import sdpa
from primaldual.ops.layer import ROUTES
from primaldual.primal import Gated, KernelSum, PerToken, Pooled, Primal, Recenter, RmsNorm, Rotary
from primaldual.training.capture import step_graph
from support.battery import relative_error
from support.interpreter import child_process, on_cpu
from support.rounding import rounded_at_every_step

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)

test_the_kernels_in_the_interpreter = child_process(__file__)

E, H, N = 32, 4, 2
LAYERS = {
    "softmax": mechanism("softmax", rotary=Rotary(7.0)),
    "gate+sh": mechanism("gate+sh", rotary=Rotary(7.0), scales=(1, 1, 2, 4)),
    "gates of heads, a part of the channels": mechanism(
        "gate+sh", per="head", rotary=Rotary(7.0, 0.7), scales=(1, 2, 3, 2)
    ),
    "normalised, with a sink": Primal(inputs=(Rotary(7.0), RmsNorm()), normalizer=Gated(KernelSum("learned"))),
    "recentred": Primal(inputs=(Rotary(7.0), Recenter(0.5)), training_set=Pooled((2, 1, 2, 1))),
}


@pytest.fixture
def ragged_attends(monkeypatch):
    """Where it can: a CPU would take torch's attention."""
    monkeypatch.setattr(sdpa, "refusal", lambda problem: "not here")
    monkeypatch.setattr(import_module("primaldual.ops._attention"), "_known", {})


def random_layer(primal: Primal, **options) -> MultiheadAttention:
    layer = MultiheadAttention(E, H, batch_first=True, mechanism=primal, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def results(layer: MultiheadAttention, x: torch.Tensor, **call) -> dict[str, torch.Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    out = layer(x, x, x, need_weights=False, **call)[0]
    up = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"out": out.detach()} | dict(zip(names, torch.autograd.grad(out, [x, *layer.parameters()], up), strict=True))


def check(layer: MultiheadAttention, x: torch.Tensor, **call) -> None:
    """Equal to the reference in float64 of the same numbers, within 32 roundings of the largest."""
    wanted = results(reference_of(layer).double(), x.double(), **call)
    for name, found in results(layer, x, **call).items():
        truth = wanted[name]
        assert found.dtype == x.dtype
        assert float((found - truth).abs().max()) < 32 * torch.finfo(x.dtype).eps * float(truth.abs().max()), name


@on_cpu
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_reference(name, is_causal, ragged_attends):
    layer, x = random_layer(LAYERS[name], impl="rotary"), torch.randn(N, 21, E)
    check(layer, x, is_causal=is_causal)


@on_cpu
def test_the_way_back_is_in_one_buffer_where_our_kernel_attends(monkeypatch, ragged_attends):
    turned, turn = [], turning.turn

    def watched(q, k, to_q, to_k, *others):
        turned.append(q.data_ptr() == to_q.data_ptr() and k.data_ptr() == to_k.data_ptr())
        turn(q, k, to_q, to_k, *others)

    monkeypatch.setattr(projection, "turn", watched)
    monkeypatch.setattr(torch, "stack", lambda *given: pytest.fail("the gradients were copied"))
    layer, x = random_layer(LAYERS["gate+sh"], impl="rotary", bias=False), torch.randn(N, 16, E)
    results(layer, x, is_causal=True)
    assert turned == [True, True]


@on_cpu
@pytest.mark.parametrize("call", ["padding", "offset", "mask", "weights", "shared keys"])
def test_every_call_is_the_reference_on_some_route(call):
    primal = LAYERS["gates of heads, a part of the channels"]
    options = {"num_kv_heads": 2} if call == "shared keys" else {}
    if call in ("mask", "shared keys"):
        primal = mechanism("gate", per="head", rotary=Rotary(7.0, 0.7))
    layer, x = random_layer(primal, **options), torch.randn(N, 9, E)
    hidden = torch.arange(9) < torch.tensor([[0], [3]])
    given = {"padding": {"key_padding_mask": hidden}, "offset": {"query_offset": 3},
             "mask": {"attn_mask": (torch.arange(9) - torch.arange(9)[:, None]) % 4 == 1}}.get(call, {})  # fmt: skip
    if call == "weights":
        found, wanted = layer(x, x, x, is_causal=True), reference_of(layer)(x, x, x, is_causal=True)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        return
    check(layer, x, is_causal=call != "mask", **given)


@dataclass(frozen=True)
class Reversed(Rotary):
    """It turns the other way."""

    def at(self, x, positions, parameters):
        return super().at(x, -2 * positions, parameters)


@dataclass(frozen=True)
class Faster(Rotary):
    """It inherits `at`, and its angles are its own."""

    def turns(self, positions, head_dim):
        return super().turns(3 * positions, head_dim)


@dataclass(frozen=True)
class Bent(Gated):
    """Its gates are no sigmoids."""

    def made(self, heads, value_dim):
        return {n: PerToken(p.of, p.start, torch.tanh) for n, p in super().made(heads, value_dim).items()}


@on_cpu
@pytest.mark.parametrize("primal", [
    Primal(inputs=(Reversed(7.0),)), Primal(inputs=(Faster(7.0),)), Primal(normalizer=Bent(per="channel")),
    Primal(normalizer=Bent(), inputs=(Reversed(7.0, 0.5), Rotary(5.0))),
], ids=["turned back", "faster", "bent", "all"])  # fmt: skip
def test_parts_of_ones_own_are_computed_as_they_are(primal):
    layer, x = random_layer(primal), torch.randn(N, 9, E)
    assert layer.plan(x, is_causal=True).route == "separate"
    check(layer, x, is_causal=True)


@on_cpu
def test_a_gate_that_somebody_watches_is_called(monkeypatch):
    layer, x, seen = random_layer(LAYERS["gate+sh"]), torch.randn(N, 9, E), []
    monkeypatch.setattr(gating, "gated", lambda *given: pytest.fail("the hook was not asked"))
    layer.made["gate"].register_forward_hook(lambda module, given, out: seen.append(out.detach()) or 0.5 * out)
    wanted = reference_of(layer)(x, x, x, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(layer(x, x, x, is_causal=True, need_weights=False)[0], wanted, rtol=1e-4, atol=1e-5)
    assert len(seen) == 2 and float(seen[0].min()) >= 0  # it was given gates

    class Half(MadeOfInput):
        def forward(self, x):
            return 0.5 * super().forward(x)

    gate = Half(LAYERS["gate+sh"].made(H, E // H)["gate"], E)
    assert not gate.plain


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("length", [57, 512])
@pytest.mark.parametrize("name", LAYERS)
def test_on_a_gpu_a_layer_is_the_reference(name, length, dtype):
    torch.manual_seed(0)
    layer = random_layer(LAYERS[name], impl="rotary").to("cuda", dtype)
    x = torch.randn(N, length, E, device="cuda").to(dtype)
    with rounded_at_every_step():
        rough = results(reference_of(layer), x, is_causal=True)
    wanted = results(reference_of(layer).double(), x.double(), is_causal=True)
    for what, found in results(layer, x, is_causal=True).items():
        budget = 2 * relative_error(rough[what], wanted[what]) + 8 * torch.finfo(dtype).eps
        assert relative_error(found, wanted[what]) < budget, what


@pytest.mark.gpu
def test_on_a_gpu_a_captured_step_is_the_eager_one():
    layer, x = random_layer(LAYERS["gate+sh"], impl="rotary").to("cuda"), torch.randn(N, 256, E, device="cuda")
    eager = results(layer, x, is_causal=True)
    captured = step_graph(lambda: results(layer, x, is_causal=True))
    for found in captured.result.values():
        found.fill_(torch.nan)
    captured.graph.replay()
    torch.cuda.synchronize()
    for name, found in captured.result.items():
        torch.testing.assert_close(found, eager[name], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_language_layers_take_this_way():
    for length, batch in ((1024, 32), (4096, 8)):
        primal = mechanism("gate+sh", rotary=True, scales=(1, 1, 2, 2, 4, 4, 8, 8))
        layer = MultiheadAttention(512, 8, batch_first=True, mechanism=primal, dtype=torch.bfloat16, device="cuda")
        x = torch.empty(batch, length, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert layer.plan(x, is_causal=True).route == "rotary"
            (inner,) = ROUTES["rotary"].inner(layer.state(x, x, x, need_weights=False, is_causal=True))
        assert inner.impl == "mixed"
