"""gradcheck, torch.compile, vmap and autocast, for every mechanism."""

import warnings

import pytest
import torch

from primaldual import attention
from support.battery import FASTEST, HEADS, NAMED, PRIMALS, Case, inputs, parameters


# with k-means a nudge can move a key to another cluster: the function has jumps
@pytest.mark.parametrize("name", [name for name in PRIMALS if name != "sh-kmeans"])
def test_gradcheck(name: str) -> None:
    primal = PRIMALS[name]
    length = 4 if name == "conv2d" else 5
    case = Case(length, length, "padding")
    qkv, masks = inputs(case, dim=2)
    learned = parameters(primal, case, dim=2)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        named = dict(zip(learned, tensors[3:], strict=True))
        return attention(*tensors[:3], primal, parameters=named, impl=FASTEST[name], **masks)

    assert torch.autograd.gradcheck(run, (*qkv, *learned.values()), fast_mode=True)


def compiled_equals_eager(name: str, backend: str, causal: bool = False) -> None:
    torch._dynamo.reset()
    primal = PRIMALS[name]
    case = Case(16, 16, "none" if causal else "padding", causal)
    qkv, masks = inputs(case)
    learned = parameters(primal, case)

    def run(q, k, v, learned):
        return attention(q, k, v, primal, parameters=learned, impl=FASTEST[name], **masks)

    eager = run(*qkv, learned)
    compiled = torch.compile(run, backend=backend, fullgraph=True)(*qkv, learned)
    leaves = (*qkv, *learned.values())
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-10)
    for mine, theirs in zip(
        torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


# seconds each: gates and decays are compiled with scaled heads
COMPILED = [*(name for name in NAMED if name not in ("gate", "forget")), "linear-random", "linear-taylor", "sh-conv"]
# their parts are compiled in others
COMBINED = (
    "bn", "linear-bn", "linear-sh", "sparse-bn", "sparse-sh", "alibi+sh", "gate+sh", "gaussian", "polynomial",
    "linear-taylor", "sh-conv",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep) if name in COMBINED else name for name in COMPILED]
)
def test_compiles_into_one_graph(name: str) -> None:
    compiled_equals_eager(name, "aot_eager")


@pytest.mark.parametrize("name", ["bn", "sh", "linear"])
def test_the_causal_form_compiles_into_one_graph(name: str) -> None:
    compiled_equals_eager(name, "aot_eager", causal=True)


@pytest.mark.parametrize(("name", "case"), [("bn+sh", Case(9, 9, causal=True)), ("linear-bn", Case(9, 9, "attn"))])
def test_weights_compile_into_one_graph(name: str, case: Case) -> None:
    torch._dynamo.reset()
    primal = NAMED[name]
    qkv, masks = inputs(case)

    def run(q, k, v):
        out, weights = attention(q, k, v, primal, need_weights=True, **masks)
        return out.sum() + weights.square().sum()

    eager = torch.autograd.grad(run(*qkv), qkv)
    compiled = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(*qkv), qkv)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["bn", "sh", "linear-bn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch")
def test_compiles_with_inductor(name: str) -> None:
    compiled_equals_eager(name, "inductor")


@pytest.mark.parametrize("name", PRIMALS)
def test_vmap_equals_a_loop(name: str) -> None:
    primal = PRIMALS[name]
    q, k, v = torch.randn(3, 3, 2, HEADS, 16, 4, dtype=torch.float64)
    _, masks = inputs(Case(16, 16, "padding"))

    def run(q, k, v):
        return attention(q, k, v, primal, impl=FASTEST[name], **masks)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        together = torch.vmap(run)(q, k, v)
    loop = torch.stack([run(*one) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(together, loop, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", PRIMALS)
def test_autocast_gives_bfloat16_close_to_float32(name: str) -> None:
    primal = PRIMALS[name]
    q, k, v = (torch.randn(2, HEADS, 16, 8) for _ in range(3))
    exact = attention(q, k, v, primal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, k, v, primal, impl=FASTEST[name])
    # products are rounded to 8 bits; scores of order 1 and a few roundings in sequence
    tolerance = 0.1 if "unit" not in name else 0.1 * float(exact.abs().max())
    assert (found.float() - exact).abs().max() < tolerance
