"""The kernels of depth-wise convolutions along the tokens against the map itself in float64.

They run in Triton's interpreter, in a child process that runs this file, and on a GPU as they are.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

from primaldual import attention
from primaldual.ops import token_maps
from primaldual.ops.places import Places
from primaldual.primal import DepthwiseConv1d, Primal, Rotary
from support.interpreter import ON_CPU, child_process

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

test_the_kernels_in_the_interpreter = child_process(__file__)
test_more_of_them_in_the_interpreter = child_process(__file__, deep=True)
gpu = pytest.mark.gpu
DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not ON_CPU, reason="runs in the child process")),
        pytest.param("cuda", marks=gpu),
    ],
)
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

BUDGETS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.deep) for dtype in list(BUDGETS)[1:])]
SHAPES = {  # batch, heads, tokens, head dimension, taps, causal
    "one token": (1, 1, 1, 4, 5, False),
    "one tap": (2, 3, 7, 8, 1, True),
    "causal": (2, 2, 40, 16, 5, True),
    "both sides": (3, 2, 33, 7, 4, False),
    "more taps than tokens": (1, 2, 3, 5, 9, False),
    "two spans": (1, 1, 530, 3, 3, True),
}


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def draw(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Heads inside the tokens, and rows that lie apart: as they come out of a projection."""
    batch, heads, length, dim = shape
    x = torch.randn(batch, length, heads, 2 * dim, generator=torch.Generator().manual_seed(length))
    return x.to(device, dtype)[..., :dim].transpose(1, 2)


@DEVICES
@pytest.mark.parametrize("channels", ["one", "each"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_and_gradients_are_those_of_the_map(shape, dtype, channels, device):
    batch, heads, length, dim, size, causal = shape
    map_ = DepthwiseConv1d(size, causal, channels)
    kernel = map_.learned(heads, dim)["conv_kernel"].to(device)
    kernel = kernel + 0.3 * torch.randn(kernel.shape, generator=torch.Generator().manual_seed(1)).to(device)
    leaves = [draw(batch, heads, length, dim, dtype=dtype, device=device).requires_grad_(), kernel.requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    assert token_maps.launched(leaves[0])
    here = Places(0, length)
    learned = {"conv_kernel": leaves[1]}
    found, _ = token_maps.on_tokens(Primal(inputs=(map_,)), leaves[0], leaves[0], here, here, learned, learned)
    wanted = map_.tokens(exact[0], {"conv_kernel": exact[1]})
    up = draw(batch, heads, length, dim, dtype=dtype, device=device)
    gradients = torch.autograd.grad(found, leaves, up), torch.autograd.grad(wanted, exact, up.double())
    for a, b in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        assert a.shape == b.shape and relative(a.detach(), b.detach()) < BUDGETS[dtype]


@DEVICES
def test_it_can_be_differentiated_as_often_as_one_likes(device):
    map_ = DepthwiseConv1d(3, False, "each")
    x = torch.randn(2, 2, 6, 4, device=device, requires_grad=True)
    kernel = torch.randn(2, 4, 3, device=device, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (x, kernel)]

    def twice(x, kernel, run):
        gradients = torch.autograd.grad(run(x, {"conv_kernel": kernel}).pow(3).sum(), (x, kernel), create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in gradients), (x, kernel))

    found = twice(x, kernel, lambda x, learned: token_maps.convolved(map_, x, learned))
    for a, b in zip(found, twice(*exact, map_.tokens), strict=True):
        assert relative(a, b) < 1e-5


@dataclass(frozen=True)
class Doubled(DepthwiseConv1d):
    """Twice the convolution."""

    def tokens(self, x, parameters):
        return 2 * super().tokens(x, parameters)


@DEVICES
@pytest.mark.parametrize(
    "map_", [DepthwiseConv1d(3, True, "each"), Doubled(3, True), DepthwiseConv1d(20, True)], ids=repr
)
def test_attention_behind_a_convolution_is_the_reference(map_, device):
    primal = Primal(inputs=(map_, Rotary(7.0)))
    q, k, v = (torch.randn(2, heads, 9, 8, device=device, requires_grad=True) for heads in (4, 2, 2))
    kernel = torch.randn(map_.learned(2, 8)["conv_kernel"].shape, device=device, requires_grad=True)
    leaves = [q, k, v, kernel]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    hidden = torch.tensor([[0] * 9, [1, 1] + [0] * 7], dtype=torch.bool, device=device)
    found, wanted = (
        attention(*t[:3], primal, parameters={"conv_kernel": t[3]}, is_causal=True, key_padding_mask=hidden, impl=impl)
        for t, impl in ((leaves, "sdpa"), (exact, "reference"))
    )
    up = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, up), torch.autograd.grad(wanted, exact, up.double())
    for a, b in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        assert relative(a.detach(), b.detach()) < 5e-6
