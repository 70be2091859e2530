"""The kernels as they are compiled for Hopper, run on a CPU (`support.hopper`), against the reference.

What Triton's interpreter cannot tell: bfloat16, tf32, inline assembly, what the compiler does with shared memory, and
launches that start early. The files of the kernels' tests run like this, too, with PRIMALDUAL_HOPPER=1.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import pytest
import torch

from nn.layers import reference_of
from primaldual import MultiheadAttention, attention, mechanism
from primaldual.primal import Fixed, Strided, Window
from support.battery import relative_error
from support.interpreter import HOPPER, ON_CPU
from support.ragged import Shape, adding_up, check, replayed, sweeping

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if ON_CPU and not HOPPER:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from support.hopper import HopperError, hopper
from support.rounding import rounded_at_every_step

pytestmark = pytest.mark.deep
HEADS, HALF = 4, torch.bfloat16
PRIMALS = {
    "softmax": mechanism("softmax"),
    "sh": mechanism("sh", scales=(8, 1, 2, 3)),
    "bn+sh": mechanism("bn+sh", learnable=True, scales=(4, 1, 2, 1)),
    "long windows": mechanism("bn+sh", scales=(100, 1, 70, 2)),
    "strided": mechanism("sparse-bn+sh", pattern=Strided(None), scales=(4, 1, 2, 1)),
    "fixed": mechanism("sparse", pattern=Fixed(None, 2)),
    "window": mechanism("sparse-sh", pattern=Window(None), scales=(4, 1, 2, 1)),
}
WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as planned": nullcontext,
    "swept": sweeping,
    "together": lambda: adding_up(64, 128, 8, 2, 0),
}


def ids(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.fixture
def compiled() -> Iterator[None]:
    with hopper() as driver:
        yield
    assert driver.launched


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("bn+sh", (length, length, 16, 16), HALF) for length in (1, 17, 129, 300)]
    + [("sh", (length, length, 64, 64), HALF) for length in (1, 16, 128, 257)]
    + [("bn+sh", (129, 127, dim, dim), HALF) for dim in (8, 32, 64, 128)]
    + [("bn+sh", (127, 129, 24, 40), HALF), ("softmax", (200, 33, 64, 64), HALF)]
    + [("long windows", (40, 300, dim, dim), HALF) for dim in (16, 128)]
    + [("bn+sh", (129, 127, dim, dim), torch.float16) for dim in (8, 64)]
    + [("bn+sh", (65, 100, dim, dim), torch.float32) for dim in (16, 64)]
    + [("long windows", (17, 150, 16, 16), torch.float32)],
    ids=ids,
)
def test_shapes_and_dtypes(name: str, shape: Shape, dtype: torch.dtype) -> None:
    check(PRIMALS[name], shape, dtype, heads=HEADS)


@pytest.mark.parametrize("dim", [16, 64])
def test_float32_products_may_be_rounded_to_tf32(dim: int) -> None:
    with hopper(tf32=True):
        check(PRIMALS["bn+sh"], (129, 127, dim, dim), torch.float32, heads=HEADS, eps=2.0**-10)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("mask", ["none", "padding", "bias"])
@pytest.mark.parametrize("name", ["softmax", "bn+sh"])
def test_causal_heads_and_masks(name: str, mask: str) -> None:
    for causal in (False, True) if mask != "none" else (True,):
        check(PRIMALS[name], (129, 129, 16, 16), HALF, heads=HEADS, mask=mask, is_causal=causal, batch=2)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "dim"), [("softmax", 8), ("bn+sh", 16), ("sh", 64), ("strided", 16), ("fixed", 8), ("window", 64)], ids=ids
)
def test_dropout_drops_what_the_hash_says(name: str, dim: int, way: str) -> None:
    with WAYS[way](), replayed(PRIMALS[name], HEADS, -123456789):
        check(PRIMALS[name], (129, 145, dim, dim), HALF, heads=HEADS, dropout_p=0.2)


@pytest.mark.usefixtures("compiled")
def test_dropout_of_padded_heads_that_fill_no_block() -> None:
    with replayed(PRIMALS["bn+sh"], HEADS, 5):
        check(PRIMALS["bn+sh"], (129, 145, 40, 40), HALF, heads=HEADS, mask="padding", dropout_p=0.1)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("size", [1e2, 1e4, 1.5e4])
def test_scores_as_large_as_halves_can_make_them(size: float) -> None:
    """All weight is on one key: its value is the output, and gradients are bounded."""
    q, k, v = ((factor * torch.randn(1, 2, 140, 16)).half().requires_grad_() for factor in (size, size, 1.0))
    out = attention(q, k, v, "softmax", impl="ragged")
    truth = attention(q.double(), k.double(), v.double(), "softmax", impl="reference")
    torch.testing.assert_close(out.double(), truth, rtol=2.0**-10, atol=2.0**-10)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@rounded_at_every_step()
def test_linear_attention(is_causal: bool) -> None:
    qkv = [torch.randn(2, 2, 150, 64, dtype=HALF) for _ in range(3)]
    results = []
    for impl, dtype in (("linear", HALF), ("reference", HALF), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        out = attention(*leaves, "linear", is_causal=is_causal, impl=impl)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for found, rough, truth in zip(*results, strict=True):
        errors = [relative_error(x.detach(), truth.detach()) for x in (found, rough)]
        assert errors[0] < 2 * errors[1] + 8 * torch.finfo(HALF).eps


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("length", [129, 256])
@pytest.mark.parametrize("name", ["bn", "sh", "bn+sh"])
@rounded_at_every_step()
def test_layers(name: str, length: int) -> None:
    """Projections, means and sums around the attention, with queries that are re-centred where they lie."""
    layer = MultiheadAttention(256, HEADS, batch_first=True, mechanism=PRIMALS.get(name, name), dtype=HALF)
    x, up = torch.randn(2, length, 256, dtype=HALF), torch.randn(2, length, 256, dtype=HALF)
    results = []
    for step, dtype in ((layer, HALF), (reference_of(layer), HALF), (reference_of(layer), torch.float64)):
        step, leaf = step.to(dtype), x.to(dtype).requires_grad_()
        out = step(leaf, leaf, leaf, need_weights=False)[0]
        leaves = [leaf, *step.parameters()]
        results.append([out.detach(), *torch.autograd.grad(out, leaves, up.to(dtype))])
    for found, rough, truth in zip(*results, strict=True):
        errors = [relative_error(value, truth) for value in (found, rough)]
        assert errors[0] < 2 * errors[1] + 8 * torch.finfo(HALF).eps


def without(what: str, kernel: str, instead: str = "") -> Callable[[str], str]:
    """An edit of the kernel of this name: something else stands in place of what it says."""

    def edit(text: str) -> str:
        if f".entry {kernel}(" not in text:
            return text
        edited, count = re.subn(what, instead, text)
        assert count, f"{kernel} has no {what}"
        return edited

    return edit


EDITS = {
    "barriers": (without(r"bar\.sync\s+0;", "forward"), "another warp"),
    "barriers on the way back": (without(r"bar\.sync\s+0;", "backward"), "another warp"),
    "copies": (without(r"cp\.async\.wait_group\s+\d+;", "forward", "cp.async.wait_group 9;"), "on its way"),
    "fences": (without(r"fence\.proxy\.async\S*;", "backward"), "without a fence"),
    "programs": (without(r"%ctaid\.x", "forward", "%ctaid.y"), "another program of the launch"),
    "launches": (without(r"griddepcontrol\.wait;", "forward"), "not known to have ended"),
    "launches on the way back": (without(r"griddepcontrol\.wait;", "delta"), "not known to have ended"),
    "far": (without(r"(st\.global\S* \[ %rd\d+ \+) 0", "backward", r"\1 1048576"), "outside of the tensors"),
    "crooked": (without(r"(ld\.global\S* .*\[ %rd\d+ \+) 0", "pool", r"\1 1"), "not a multiple"),
    "unknown": (without(r"add\.f32", "forward", "add.f64"), "add.f64"),
}


@pytest.mark.parametrize("what", EDITS)
def test_what_a_gpu_would_not_forgive_is_said(what: str) -> None:
    edit, said = EDITS[what]
    with hopper(edit=edit), pytest.raises((HopperError, NotImplementedError), match=said):
        check(PRIMALS["sh"], (257, 257, 64, 64), HALF, heads=HEADS)


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_products_that_are_not_waited_for_are_no_numbers(kernel: str) -> None:
    with hopper(edit=without(r"wgmma\.wait_group\S*\s+\d+;", kernel)), pytest.raises((AssertionError, HopperError)):
        check(PRIMALS["sh"], (257, 257, 64, 64), HALF, heads=HEADS)
