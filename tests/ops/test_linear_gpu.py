"""Causal linear attention on a CUDA device: the kernels against the reference in float64, on every kind of length,
dtype, head and launch.

Errors are root mean squares over the second half of the rows, where what is summed is long and outputs are small: a
sum that went wrong stands out there.
"""

from importlib.util import find_spec
from math import isfinite

import pytest
import torch
from torch import Tensor

from primaldual import Primal, attention, mechanism
from primaldual.ops import linear
from primaldual.primal import EluPlusOne, RandomFeatures, RmsNorm
from support.rounding import rounded_at_every_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("full_precision"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

LENGTHS = (1, 17, 127, 128, 129, 1000, 4096, 4097)
PRIMALS = {
    "elu": Primal(features=EluPlusOne()),
    "random": Primal(features=RandomFeatures(64)),
    "rms": Primal(features=EluPlusOne(), inputs=(RmsNorm(),)),
    "sh": mechanism("linear-sh", scales=(1, 3)),
}
DTYPES = [(torch.bfloat16, n) for n in LENGTHS]
DTYPES += [(torch.float32, n) for n in LENGTHS]
DTYPES += [(torch.float16, n) for n in (128, 129, 4097)]


@pytest.fixture
def calls(monkeypatch) -> list:
    """The calls of the operator, so that a test knows that it ran."""
    from primaldual.kernels.linear import attention as linear_triton

    seen, run = [], linear_triton.linear_attention
    monkeypatch.setattr(linear_triton, "linear_attention", lambda *a: (seen.append(a), run(*a))[1])
    return seen


def draw(shape: tuple, dtype: torch.dtype, mask: str = "none", heads: int = 2) -> dict[str, Tensor]:
    """q, k, v, a gradient of the output and, where there is a mask, a bias on keys, some of them hidden."""
    L, S, D, C = shape
    generator = torch.Generator().manual_seed(L)
    shapes = {"q": (2, heads, L, D), "k": (2, heads, S, D), "v": (2, heads, S, C), "up": (2, heads, L, C)}
    tensors = {n: torch.randn(s, generator=generator).to(dtype).cuda() for n, s in shapes.items()}
    if mask == "bias":
        tensors["bias"] = torch.randn(2, S, generator=generator).to(dtype).cuda()
        tensors["bias"][1, torch.rand(S, generator=generator) < 0.4] = -torch.inf
    return tensors


def step(primal: Primal, tensors: dict[str, Tensor], dtype: torch.dtype, impl: str) -> dict[str, Tensor]:
    """The output and every gradient."""
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in tensors.items() if n != "up"}
    q, k, v, *bias = leaves.values()
    gamma = {n: x.to(q) for n, x in primal.learned(q.shape[1], q.shape[3]).items()}
    mask = bias[0] if bias else None
    out = attention(q, k, v, primal, is_causal=True, key_padding_mask=mask, parameters=gamma, impl=impl)
    gradients = torch.autograd.grad(out, list(leaves.values()), tensors["up"].to(dtype))
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def error(value: Tensor, truth: Tensor) -> float:
    """The root mean square of the deviation over that of the truth, on the second half of the rows.

    A query that sees one key has no gradient: where the truth is zero but for its own rounding, the deviation itself.
    """
    rows = slice(truth.shape[-2] // 2, None) if truth.ndim == 4 else slice(None)
    value, truth = value[..., rows, :].double(), truth[..., rows, :]
    deviation, size = (value - truth).square().mean().sqrt(), truth.square().mean().sqrt()
    return float(deviation / size if size > 1e-9 else deviation)


def check(name: str, shape: tuple, dtype: torch.dtype, mask: str = "none", **kinds: int) -> None:
    """Outputs and gradients within 4 eps in the mean, and twice the error of products of torch at this dtype."""
    primal, tensors = PRIMALS[name], draw(shape, dtype, mask, **kinds)
    found = step(primal, tensors, dtype, "linear")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_has_kernel", lambda _: False)
        # the reference holds a training set for every causal query
        truth = step(primal, tensors, torch.float64, "reference" if shape[0] <= 200 else "linear")
        with rounded_at_every_step():
            rough = step(primal, tensors, dtype, "linear")
    for what, value in truth.items():
        beside = error(rough[what], value)
        beside = min(beside, 0.05) if isfinite(beside) else 0.0  # in float16 torch's products can overflow
        budget = 2 * beside + 4 * torch.finfo(dtype).eps
        assert error(found[what], value) < budget, what


@pytest.mark.parametrize(("dtype", "length"), DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("name", ["elu", "random"])
def test_lengths(name: str, dtype: torch.dtype, length: int, calls: list) -> None:
    check(name, (length, length, 64, 64), dtype)
    assert calls


@pytest.mark.parametrize("shape", [(129, 129), (127, 1000), (1000, 127), (1024, 1024)], ids=str)
@pytest.mark.parametrize("name", ["elu", "random", "rms"])
def test_masks(name: str, shape: tuple, calls: list) -> None:
    check(name, (*shape, 64, 64), torch.bfloat16, "bias")
    assert calls


@pytest.mark.parametrize("dims", [(8, 8), (16, 16), (32, 32), (128, 128), (64, 24), (40, 128)], ids=str)
@pytest.mark.parametrize("name", ["elu", "random"])
def test_head_dimensions(name: str, dims: tuple, calls: list) -> None:
    for length in (129, 1024):
        check(name, (length, length, *dims), torch.bfloat16)
    assert calls


@pytest.mark.parametrize("dim", [8, 16, 32])
def test_head_dimensions_in_float32(dim: int, calls: list) -> None:
    check("elu", (129, 129, dim, dim), torch.float32)
    assert calls


@pytest.mark.parametrize("programs", [1, 8, 4096], ids=["one segment", "few", "many"])
@pytest.mark.parametrize("name", ["elu", "random"])
def test_a_sequence_is_cut_into_segments(name: str, programs: int, monkeypatch, calls: list) -> None:
    from primaldual.kernels.linear import attention as linear_triton

    monkeypatch.setattr(linear_triton, "PROGRAMS", programs)
    for length in (1000, 4096):
        check(name, (length, length, 64, 64), torch.bfloat16)
    assert calls


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("warps", [4, 8])
def test_any_launch(warps: int, stages: int, monkeypatch) -> None:
    """Rows in flight while others are computed with: where a product was once left reading what the next one wrote."""
    from primaldual.kernels.linear import attention as linear_triton

    monkeypatch.setattr(linear_triton, "tile_of", lambda *_: linear_triton.Tile(64, warps, stages))
    monkeypatch.setattr(linear_triton, "PROGRAMS", 1)
    for length in (1000, 1024):
        check("elu", (length, length, 64, 64), torch.bfloat16)


@pytest.mark.parametrize("name", ["elu", "random"])
def test_any_strides(name: str) -> None:
    tensors = draw((300, 300, 64, 64), torch.bfloat16)
    q, k, v = (tensors[n].requires_grad_() for n in "qkv")
    strided = [
        q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        torch.stack([k.detach()] * 2, dim=-1).flatten(-2)[..., ::2].requires_grad_(),
        v.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_(),
    ]
    results = []
    for leaves in ((q, k, v), strided):
        out = attention(*leaves, PRIMALS[name], is_causal=True, impl="linear")
        results.append((out, *torch.autograd.grad(out, leaves, tensors["up"])))
    for straight, other in zip(*results, strict=True):
        assert error(other, straight.double()) < 2 * torch.finfo(torch.bfloat16).eps


def test_pooled_heads(calls: list) -> None:
    check("sh", (1000, 1000, 64, 64), torch.bfloat16)
    assert all(q.shape[1] == 1 for q, *_ in calls)  # the head of scale 1


def test_nothing_in_gives_nothing() -> None:
    q, k, v = (torch.randn(0, 2, 17, 64, device="cuda", requires_grad=True) for _ in range(3))
    out = attention(q, k, v, "linear", is_causal=True, impl="linear")
    assert out.shape == q.shape
    assert all(g.shape == q.shape for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("name", ["elu", "random"])
def test_a_long_sequence_is_finite_and_reproducible(name: str) -> None:
    tensors = draw((65536, 65536, 64, 64), torch.bfloat16)
    steps = [step(PRIMALS[name], tensors, torch.bfloat16, "linear") for _ in range(2)]
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*(s.values() for s in steps), strict=True))


def test_what_the_kernels_do_not_take_runs_in_torch(calls: list) -> None:
    check("elu", (129, 129, 20, 20), torch.bfloat16)
    check("elu", (129, 129, 128, 128), torch.float32)
    assert not calls
