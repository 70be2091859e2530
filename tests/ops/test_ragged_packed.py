"""Gradients of queries, keys and values that are thirds of one buffer: thirds of one buffer too, and the same numbers.

Where there is no GPU the kernels run in Triton's interpreter, in a child process that runs this file.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from primaldual.kernels.ragged import tokens as ragged_tokens
from support.interpreter import ON_CPU, child_process
from support.ragged import sweeping

# numpy's, in the interpreter: hashes wrap around, and what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)
DEVICES = ["cpu"] if ON_CPU else [pytest.param("cuda", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize("device", DEVICES)
CALLS = [(torch.float32, 13, 0.0), (torch.float32, 70, 0.3), (torch.float16, 13, 0.3)]
CALLS += [] if ON_CPU else [(torch.bfloat16, 896, 0.1)]
"""Dtype, length and dropout; float32 has blocks of 64 keys."""

KINDS = {"softmax": (False, (1, 1)), "sh": (False, (2, 1)), "bn": (True, (1, 1)), "bn+sh": (True, (4, 1))}
"""Whether queries are re-centred, and the scales of the heads."""


test_the_kernels_in_the_interpreter = child_process(__file__)


def thirds(device: str, dtype: torch.dtype, length: int, order: tuple[int, ...] = (0, 1, 2)) -> list[Tensor]:
    """Queries, keys and values [2, 2, length, 8] of one buffer, in the order in which they lie in it."""
    whole = torch.randn(2, length, 3, 2, 8, device=device).to(dtype)
    parts = whole.permute(2, 0, 3, 1, 4).unbind(0)
    return [parts[i].requires_grad_() for i in order]


def apart(parts: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in parts]


def gradients(attend, parts: list[Tensor], kind: str, dropout_p: float = 0.0) -> list[Tensor]:
    """Of q, k, v and, where queries are re-centred, of β."""
    recentred, scales = KINDS[kind]
    device = parts[0].device
    beta = torch.tensor([0.7, 1.2], device=device, requires_grad=True) if recentred else None
    seed = torch.tensor([5], dtype=torch.int32, device=device) if dropout_p else None
    out = attend(*parts, beta, scales, False, dropout_p, seed)
    out = out if isinstance(out, Tensor) else out[0]
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return list(torch.autograd.grad(out, parts if beta is None else [*parts, beta], up))


def one_buffer(found: list[Tensor]) -> bool:
    """Whether the first three are side by side in one."""
    dq, dk, dv = found[:3]
    step = dq.shape[1] * dq.shape[3] * dq.element_size()
    together = dq.untyped_storage().data_ptr() == dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr()
    return together and dk.data_ptr() - dq.data_ptr() == step == dv.data_ptr() - dk.data_ptr()


def check(found: list[Tensor], expected: list[Tensor], keys: Tensor) -> None:
    for mine, theirs in zip(found[:3], expected[:3], strict=True):
        eps = torch.finfo(mine.dtype).eps  # sums over tokens may be taken in another order
        torch.testing.assert_close(mine, theirs, rtol=4 * eps, atol=4 * eps * theirs.abs().max().item())
    if len(found) > 3:
        error, budget = (found[3] - expected[3]).abs(), budget_of_beta(found[0], expected[0], keys)
        assert (error <= budget).all(), f"β's gradient is off by {error.tolist()}, not {budget.tolist()}"


def budget_of_beta(dq: Tensor, other: Tensor, keys: Tensor) -> Tensor:
    """How far apart the gradients of β may be, [heads], where those of the queries are as given.

    It is −Σ dq·μ, of gradients that have been rounded. Where their sums are taken in any order some are rounded the
    other way, and what they differ by is all that may differ here, but for a few roundings of the sum in float32.
    """
    dq, other, mean = dq.float(), other.float(), keys.float().mean(2, keepdim=True).abs()
    rounding = 8 * torch.finfo(torch.float32).eps
    return (((dq - other).abs() + rounding * dq.abs()) * mean).sum((0, 2, 3))


@everywhere
@pytest.mark.parametrize(("dtype", "length", "dropout_p"), CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_separate_tensors(kind, dtype, length, dropout_p, device):
    parts = thirds(device, dtype, length)
    found = gradients(ragged_tokens._Tokens.apply, parts, kind, dropout_p)
    expected = gradients(ragged_tokens._Tokens.apply, apart(parts), kind, dropout_p)
    assert one_buffer(found) and not one_buffer(expected)
    check(found, expected, parts[1])


@everywhere
@pytest.mark.parametrize("kind", ["softmax", "bn+sh"])
def test_whole_heads_in_one_sweep(kind, device):
    parts = thirds(device, torch.float16, 131)
    with sweeping():
        found = gradients(ragged_tokens._Tokens.apply, parts, kind, 0.3)
        expected = gradients(ragged_tokens._Tokens.apply, apart(parts), kind, 0.3)
    assert one_buffer(found)
    check(found, expected, parts[1])


@everywhere
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (0, 0, 2)], ids=str)
def test_what_lies_in_another_order_has_gradients_of_its_own(order, device):
    parts = thirds(device, torch.float32, 13, order)
    found = gradients(ragged_tokens._Tokens.apply, [x.view_as(x) for x in parts], "bn")
    assert not one_buffer(found)
    check(found, gradients(ragged_tokens._Tokens.apply, apart(parts), "bn"), parts[1])


@everywhere
@pytest.mark.parametrize("kind", KINDS)
def test_results_of_the_operator_are_apart(kind, device):
    parts = thirds(device, torch.float32, 13)
    found = gradients(ragged_tokens.tokens_op, parts, kind)
    assert len({x.untyped_storage().data_ptr() for x in found}) == len(found)
    check(found, gradients(ragged_tokens._Tokens.apply, parts, kind), parts[1])
