"""The kernels that turn queries and keys and that gate outputs, against the reference in float64.

They run in Triton's interpreter: in a child process that runs this file.
"""

from importlib.util import find_spec

import pytest
import torch

from primaldual import attention
from primaldual.kernels.gate import gating
from primaldual.kernels.rotary import turning
from primaldual.ops import rotary, token_maps
from primaldual.ops.places import Places
from primaldual.primal import Primal, Rotary
from support.interpreter import child_process, on_cpu

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

test_the_kernels_in_the_interpreter = child_process(__file__)

BUDGETS = {torch.float32: 2e-6, torch.float16: 2e-3}


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads inside the tokens, and rows that lie apart: as they come out of a projection."""
    batch, heads, length, dim = shape
    return torch.randn(batch, length, heads, 2 * dim, dtype=dtype)[..., :dim].transpose(1, 2)


SHAPES = {  # batch, heads, key heads, queries, keys, head dimension, fraction, offset
    "one token": (1, 1, 1, 1, 1, 2, 1.0, 0),
    "self": (2, 4, 4, 21, 21, 16, 1.0, 0),
    "shared keys": (2, 6, 2, 7, 19, 8, 1.0, 12),
    "a part of the channels": (2, 2, 2, 9, 9, 14, 0.5, 0),
    "pairs and an odd one": (3, 3, 1, 5, 40, 7, 0.7, 35),
}


@on_cpu
@pytest.mark.parametrize("dtype", BUDGETS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_queries_and_keys_are_turned_as_the_map_says(shape, dtype):
    batch, heads, kv_heads, queries, keys, dim, fraction, offset = shape
    map_ = Rotary(base=50.0, fraction=fraction)
    q, k = draw(batch, heads, queries, dim, dtype=dtype), draw(batch, kv_heads, keys, dim, dtype=dtype)
    apart = torch.arange(keys) - torch.arange(batch)[:, None] % 3
    for q_places, k_places in (
        (Places(offset, queries), Places(0, keys)),
        (Places(offset, queries, apart[:, :queries] + offset), Places(0, keys, apart)),
    ):
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        assert all(token_maps.launched(x) for x in leaves)
        found = token_maps.on_tokens(Primal(inputs=(map_,)), *leaves, q_places, k_places, {}, {})
        exact = [x.detach().double().requires_grad_() for x in (q, k)]
        wanted = [map_.at(x, at.on(x.device), {}) for x, at in zip(exact, (q_places, k_places), strict=True)]
        ups = [torch.randn_like(x) for x in found]
        gradients = torch.autograd.grad(found, leaves, ups)
        truths = torch.autograd.grad(wanted, exact, [x.double() for x in ups])
        for a, b in zip((*found, *gradients), (*wanted, *truths), strict=True):
            assert a.dtype == dtype and relative(a.detach(), b.detach()) < BUDGETS[dtype]


@on_cpu
def test_turning_in_place_and_back_leaves_what_was_there():
    q, k = (draw(2, 3, 17, 12, dtype=torch.float32) for _ in range(2))
    before = q.clone(), k.clone()
    table = rotary.table(Rotary(50.0, 0.7), 12, Places(4, 17), q.device)
    turning.turn(q, k, q, k, table, table, False)
    assert not torch.allclose(q, before[0]) and torch.equal(q[..., 8:], before[0][..., 8:])
    turning.turn(q, k, q, k, table, table, True)
    torch.testing.assert_close((q, k), before, rtol=1e-5, atol=1e-6)


@on_cpu
def test_it_can_be_differentiated_as_often_as_one_likes():
    q, k = (torch.randn(1, 2, 3, 4, dtype=torch.float32, requires_grad=True) for _ in range(2))
    table = rotary.table(Rotary(5.0), 4, Places(0, 3), q.device)
    found, _ = turning.turned(q, k, table, table)
    (first,) = torch.autograd.grad(found.square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q)
    torch.testing.assert_close(second, 8 * q.detach(), rtol=1e-5, atol=1e-5)  # |R q|² = |q|²


@on_cpu
@pytest.mark.parametrize(
    "padding", [None, [[0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]]], ids=["whole", "left padded"]
)
@pytest.mark.parametrize("offset", [0, 4])
def test_attention_with_rotary_positions_is_the_reference(padding, offset):
    primal, keys = Primal(inputs=(Rotary(7.0, 0.6),)), 7
    shapes = (2, 4, keys - offset, 8), (2, 2, keys, 8), (2, 2, keys, 6)
    q, k, v = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    hidden = None if padding is None else torch.tensor(padding, dtype=torch.bool)
    options = {"key_padding_mask": hidden, "is_causal": True, "query_offset": offset}
    found = attention(q, k, v, primal, **options)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = attention(*exact, primal, impl="reference", **options)
    up = torch.randn_like(found)
    gradients = torch.autograd.grad(found, (q, k, v), up), torch.autograd.grad(wanted, exact, up.double())
    for a, b in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        assert relative(a.detach(), b.detach()) < 2e-6


@on_cpu
@pytest.mark.parametrize("dtype", BUDGETS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("each", [True, False], ids=["channels", "heads"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 4, 33, 16), (3, 5, 7, 11)], ids=str)
def test_outputs_are_gated_as_torch_does_it(shape, each, dtype):
    batch, heads, length, dim = shape
    x = draw(*shape, dtype=dtype)
    g = draw(batch, heads, length, dim if each else 1, dtype=dtype)
    leaves = [t.detach().requires_grad_() for t in (x, 3 * g)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found, wanted = gating.gated(*leaves), exact[0] * exact[1].sigmoid()
    up = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, up), torch.autograd.grad(wanted, exact, up.double())
    for a, b in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        assert a.shape == b.shape and relative(a.detach(), b.detach()) < BUDGETS[dtype]


@on_cpu
@pytest.mark.parametrize("each", [True, False], ids=["channels", "heads"])
def test_gates_can_be_differentiated_again(each):
    leaves = [torch.randn(2, 2, 3, dim, requires_grad=True) for dim in (4, 4 if each else 1)]
    exact = [t.detach().double().requires_grad_() for t in leaves]

    def twice(x, g, run):
        gradients = torch.autograd.grad(run(x, g).square().sum(), (x, g), create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in gradients), (x, g))

    wanted = twice(*exact, lambda x, g: x * g.sigmoid())
    for a, b in zip(twice(*leaves, gating.gated), wanted, strict=True):
        assert relative(a, b) < 1e-5
