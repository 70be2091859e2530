"""The two passes of re-centred heads on cuDNN's kernels: sums over rows, and a multiple of them taken off."""

from importlib.util import find_spec

import pytest
import torch

from primaldual.ops.gpu.passes import less_mean, sum_rows
from support.interpreter import child_process, interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's

test_the_kernels_in_the_interpreter = child_process(__file__)


@interpreted
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("side_by_side", [False, True], ids=["heads", "heads side by side"])
@pytest.mark.parametrize("rows", [1, 17, 512, 513, 1100])
def test_the_mean_is_taken_off(rows: int, side_by_side: bool, learned: bool) -> None:
    keys, x = torch.randn(2, 2, 3, rows, 5).unbind(0)
    if side_by_side:
        keys, x = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (keys, x))
    beta = torch.tensor([0.5, 7.0, -1.0, 7.0, 2.0])[::2] if learned else None
    sums = sum_rows(keys)
    within = {"rtol": 0.0, "atol": rows * keys.abs().max().item() * torch.finfo(torch.float32).eps}  # of such a sum
    torch.testing.assert_close(sums.sum(2), keys.double().sum(2).float(), **within)
    to = torch.empty_like(x)
    less_mean(x, sums, to, 0.7 / rows, beta)
    expected = x - 0.7 * keys.mean(2, keepdim=True) * (1.0 if beta is None else beta[:, None, None])
    torch.testing.assert_close(to, expected)
    less_mean(x, sums, x, 0.7 / rows, beta)
    torch.testing.assert_close(x, expected)
