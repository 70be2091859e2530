"""The two passes of re-centred heads: sums over rows, and a multiple of them taken off."""

from importlib.util import find_spec

import pytest
import torch

from primaldual.kernels.ragged.passes import Shift, dot_sums, place, sum_rows
from support.interpreter import child_process, on_cpu

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's

test_the_kernels_in_the_interpreter = child_process(__file__)


@on_cpu
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("side_by_side", [False, True], ids=["heads", "heads side by side"])
@pytest.mark.parametrize("rows", [1, 17, 128, 129, 2048, 2049])
def test_the_mean_is_taken_off(rows: int, side_by_side: bool, learned: bool) -> None:
    keys, x = torch.randn(2, 2, 3, rows, 5).unbind(0)
    if side_by_side:
        keys, x = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (keys, x))
    beta = torch.tensor([0.5, 7.0, -1.0, 7.0, 2.0])[::2] if learned else None
    sums = sum_rows(keys)
    within = {"rtol": 0.0, "atol": rows * keys.abs().max().item() * torch.finfo(torch.float32).eps}  # of such a sum
    torch.testing.assert_close(sums.sum(2), keys.double().sum(2).float(), **within)
    to = torch.empty_like(x)
    place(x, to, shift=Shift(sums, 0.7 / rows, beta))
    expected = x - 0.7 * keys.mean(2, keepdim=True) * (1.0 if beta is None else beta[:, None, None])
    torch.testing.assert_close(to, expected)
    place(x, x, shift=Shift(sums, 0.7 / rows, beta))
    torch.testing.assert_close(x, expected)


@on_cpu
@pytest.mark.parametrize("rows", [1, 16, 37, 140])
def test_shares_in_the_mean_over_windows(rows: int) -> None:
    """One vote for every window, the last of which may not be whole; heads stand in the table in another order."""
    windows = (4, 1, 100)
    table = torch.tensor([[head, -(-rows // windows[head]), windows[head], *[0] * 6] for head in (1, 0, 2)])
    keys, x = torch.randn(2, 2, 3, rows, 5).unbind(0)
    keys.requires_grad_()
    means = [torch.stack([w.mean(1) for w in keys[:, h].split(windows[h], 1)], 1) for h in range(3)]
    mean = torch.stack([m.mean(1) for m in means], 1)
    torch.testing.assert_close(sum_rows(keys.detach(), table).sum(2), mean.detach())
    (shares,) = torch.autograd.grad(mean, keys, -sum_rows(x).sum(2))
    to = torch.empty_like(x)
    place(keys.detach(), to, shift=Shift(sum_rows(x), 1.0, None, table))
    torch.testing.assert_close(to, keys.detach() + shares)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("blocks", [(1, 1), (3, 16), (40, 1)])
@pytest.mark.parametrize("batch", [1, 5, 150])
def test_products_of_sums(batch: int, blocks: tuple[int, int], dtype: torch.dtype) -> None:
    """More batches and blocks than a program takes at once; the first sums lie side by side, as a layer's do."""
    a = torch.randn(batch, blocks[0], 3, 5).transpose(1, 2)
    b = torch.randn(batch, 3, blocks[1], 5)
    expected = -0.5 * torch.einsum("bhid,bhjd->h", a.double(), b.double())
    sizes = 0.5 * torch.einsum("bhid,bhjd->h", a.double().abs(), b.double().abs())
    found = dot_sums(a, b, -0.5, dtype)
    assert found.dtype == dtype
    budget = (sum(blocks) + batch) * torch.finfo(torch.float32).eps * sizes + torch.finfo(dtype).eps * expected.abs()
    assert (found.double() - expected).abs().le(budget).all()
