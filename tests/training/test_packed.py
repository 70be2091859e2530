"""The projections of queries, keys and values are one tensor, and so is their gradient: nothing is put together."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from primaldual.kernels import encoder as fused
from primaldual.models import SeriesConfig, build
from primaldual.training.member_attention import SideBySide, attend_in_layer
from primaldual.training.stacked import Stacked
from support.interpreter import ON_CPU, child_process

# numpy's, in the interpreter: hashes wrap around, and what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)
DEVICES = ["cpu"] if ON_CPU else [pytest.param("cuda", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize("device", DEVICES)
WIDTH, LENGTH, BATCH = 16, 10, 2


test_the_kernels_in_the_interpreter = child_process(__file__)


class Joined(TorchDispatchMode):
    """Counts the concatenations to the width of the three projections."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and found.shape[-1] == 3 * WIDTH:
            self.count += 1
        return found


def gradients(config: SeriesConfig, device: str, dtype: torch.dtype, padded: bool) -> tuple[list[Tensor], int]:
    """Of the inputs and the weights of a layer's attention; and how often something was put together for them."""
    torch.manual_seed(0)
    models = [build(config, seed) for seed in (3, 4)]
    weights = Stacked(models, torch.device(device), torch.float32, dtype, ("norm",))
    x = torch.randn(2, BATCH * LENGTH, WIDTH, device=device, dtype=dtype, requires_grad=True)
    padding = torch.arange(LENGTH, device=device).expand(2, BATCH, -1) > 4 if padded else None
    name = "layers.0.self_attn"
    leaves = [x, *(weights.parameters[f"{name}.in_proj_{part}"] for part in ("weight", "bias"))]
    projected, _ = fused.linear_beside(*leaves)
    hidden = padding if config.encoder == "mvts" else None
    out = attend_in_layer(config, weights, name, projected, hidden, BATCH, training=True)
    with Joined() as joined:
        found = torch.autograd.grad(out, leaves, torch.randn_like(out))
    return list(found), joined.count


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "encoder", "padded", "p"),
    [
        ("softmax", "mvts", False, 0.2), ("softmax", "flowformer", True, 0.0), ("softmax", "mvts", True, 0.2),
        ("bn", "mvts", False, 0.2), ("sh", "mvts", False, 0.0), ("bn+sh", "mvts", False, 0.2),
        ("bn+sh", "mvts", True, 0.0),
    ],
)  # fmt: skip
def test_gradients_are_those_of_plain_views(name, encoder, padded, p, dtype, device, monkeypatch):
    config = SeriesConfig(
        encoder, WIDTH, heads=2, layers=1, feedforward=16, dropout=p, channels=3, length=LENGTH, outputs=4,
        mechanism=name, impl="ragged",
    )  # fmt: skip
    found, joined = gradients(config, device, dtype, padded)
    monkeypatch.setattr(SideBySide, "apply", lambda x: x.chunk(3, -1))
    expected, plainly = gradients(config, device, dtype, padded)
    assert plainly == 1
    # hidden tokens take another way, and in float32 keys that queries are re-centred by are brought near zero before
    other = (padded and encoder == "mvts") or ("bn" in name and dtype == torch.float32)
    other |= p > 0 and device == "cpu"  # there dropout draws under a mode, in which the operator is called as such
    assert joined == int(other)
    torch.testing.assert_close(found, expected)


def test_gradients_that_are_thirds_of_one_buffer_become_that_buffer():
    x, up = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 5, 12)
    (found,) = torch.autograd.grad(SideBySide.apply(x), x, up.chunk(3, -1))
    assert found.data_ptr() == up.data_ptr() and torch.equal(found, up)


def others() -> dict[str, tuple[Tensor, ...]]:
    """Gradients [2, 5, 4] that are not the thirds of one buffer, in order."""
    q, k, v = torch.randn(2, 5, 12).chunk(3, -1)
    wider, other = torch.randn(2, 5, 16), torch.randn(2, 5, 12)
    return {
        "another order": (k, q, v),
        "one twice": (q, k, k),
        "one of zeros": (q, k, torch.zeros_like(v)),
        "of two buffers": (q, k, other.chunk(3, -1)[2]),
        "of a wider buffer": wider[..., :12].chunk(3, -1),
        "three buffers": (q.contiguous(), k.contiguous(), v.contiguous()),
    }


@pytest.mark.parametrize("case", others())
def test_other_gradients_are_put_together(case):
    x, parts = torch.randn(2, 5, 12, requires_grad=True), others()[case]
    (found,) = torch.autograd.grad(SideBySide.apply(x), x, parts)
    assert torch.equal(found, torch.cat(parts, -1))


def test_what_else_uses_a_third_is_added_without_touching_the_buffer():
    x, up = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 5, 12)
    kept = up.clone()
    q, k, v = SideBySide.apply(x)
    loss = (torch.cat((q, k, v), -1) * up).sum() + (3 * q).sum()
    (found,) = torch.autograd.grad(loss, x)
    expected = up.clone()
    expected[..., :4] += 3
    torch.testing.assert_close(found, expected)
    assert torch.equal(up, kept)


def test_gradients_add_up_over_two_ways_back():
    x, up = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 5, 12)
    seen: list[Tensor] = []
    for _ in range(2):
        q, k, v = SideBySide.apply(2 * x)
        q.register_hook(lambda dq: seen.append(dq.clone()))
        torch.cat((q, k, v), -1).backward(up)
    torch.testing.assert_close(x.grad, 4 * up)
    assert all(torch.equal(dq, up[..., :4]) for dq in seen)


def test_thirds_can_be_differentiated_twice():
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: torch.cat(SideBySide.apply(x), -1) ** 3, x)
    assert torch.autograd.gradgradcheck(lambda x: SideBySide.apply(x)[1] ** 3, x)
