"""Second derivatives, as a gradient penalty takes them: right, or an error; never a part of them.

Those of the Triton kernels are asked for in the interpreter: in a child process that runs this file.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck

from nn.layers import E, N, make, reference_of
from primaldual import MultiheadAttention, attention, mechanism
from primaldual.ops import EXECUTORS, UnsupportedError
from primaldual.primal import RandomFeatures
from support.battery import HEADS
from support.interpreter import ON_CPU, child_process, on_cpu

L = 5
MECHANISMS = ("softmax", "bn", "sh", "bn+sh", "linear", "linear-bn+sh", "sparse", "qk-norm")
REFUSED = "differentiated only once|derivative for .* is not implemented"

without_kernels = pytest.mark.skipif(ON_CPU, reason="torch's operations are differentiated in the parent process")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

test_the_kernels_in_the_interpreter = child_process(__file__)


def second_derivatives(layer: MultiheadAttention, x: Tensor) -> Tensor:
    """Of a gradient penalty, where the input has another path to the loss beside the attention."""
    x = x.detach().requires_grad_()
    loss = layer(x, x, x, need_weights=False)[0].sum() + x.pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), x)[0]


@without_kernels
@pytest.mark.parametrize("name", MECHANISMS)
def test_those_of_a_layer_are_right_or_refused(name):
    layer, x = make(name), torch.randn(N, L, E, dtype=torch.float64)
    expected = second_derivatives(reference_of(layer), x)
    if "linear" in name:  # a finite Φ runs in torch's differentiable operations
        torch.testing.assert_close(second_derivatives(layer, x), expected, rtol=1e-9, atol=1e-9)
    else:
        with pytest.raises(RuntimeError, match=REFUSED):
            second_derivatives(layer, x)


@without_kernels
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("impl", EXECUTORS)
def test_those_of_an_executor_are_right_or_refused(name, impl):
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    try:
        attention(q, k, v, name, impl=impl)
    except UnsupportedError as error:
        pytest.skip(str(error))

    def run(q, k, v):
        return attention(q, k, v, name, impl=impl)

    if impl in ("linear", "block_sparse", "dense", "reference"):  # torch's differentiable operations
        assert gradgradcheck(run, (q, k, v), fast_mode=True)
    else:
        with pytest.raises(RuntimeError, match=REFUSED):
            gradgradcheck(run, (q, k, v))


KERNELS = {
    "tokens": (mechanism("bn+sh"), {}),
    "points": (mechanism("bn", full=True), {}),
    "padded": (mechanism("sh"), {"key_padding_mask": torch.tensor([[False] * 7 + [True]])}),
    "linear": (mechanism("linear"), {}),
    "random features": (mechanism("linear-bn", features=RandomFeatures(8)), {}),
}


@on_cpu
@pytest.mark.parametrize(("primal", "masks"), KERNELS.values(), ids=KERNELS)
def test_those_of_a_kernel_are_refused(primal, masks):
    q, k, v = (torch.randn(1, HEADS, 8, 16, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, primal, impl="linear" if primal.features.finite else "ragged", **masks)
    for x in (q, k, v):
        with pytest.raises(RuntimeError, match="differentiated only once"):
            torch.autograd.grad(out.square().sum() + x.pow(3).sum(), x, create_graph=True)


@on_cpu
@pytest.mark.parametrize(
    ("name", "route"),
    [("bn", "recentred_projection"), *((name, way) for name in ("sh", "bn+sh") for way in ("unpooled", "grouped"))],
)
def test_those_of_a_layer_on_kernels_are_refused(name, route):
    layer = MultiheadAttention(8, 4, batch_first=True, mechanism=name, impl=route)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        second_derivatives(layer, torch.randn(1, 8, 8))
