"""A part of a user's own is computed as the reference computes it, on every executor that takes it."""

from importlib.util import find_spec

import pytest
import torch

from primaldual import attention
from primaldual.ops import EXECUTORS
from support.battery import HEADS, Case, outputs_and_gradients, relative_error, runs
from support.interpreter import ON_CPU, child_process, on_cpu
from support.own import OWN
from support.ragged import check
from support.rounding import rounded_at_every_step

CASES = [Case(9, 9), Case(9, 9, causal=True), Case(9, 9, "attn"), Case(5, 13, "bias"), Case(13, 5, "padding", True)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# the interpreter's, and numpy's in it
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)

if find_spec("triton") is not None:
    test_the_kernels_in_the_interpreter = child_process(__file__)


@pytest.mark.skipif(ON_CPU, reason="once is enough")
@pytest.mark.parametrize("name", OWN)
def test_every_executor_that_takes_it_equals_the_reference(name: str) -> None:
    for case in CASES:
        truth = None
        for impl in EXECUTORS:
            if impl == "reference" or not runs(OWN[name], case, impl):
                continue
            truth = truth or outputs_and_gradients(OWN[name], case, "reference")
            found = outputs_and_gradients(OWN[name], case, impl)
            for what, value in truth.items():
                assert relative_error(found[what], value) < 1e-9, f"{case} on {impl}: {what}"


@pytest.mark.skipif(ON_CPU, reason="once is enough")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", OWN)
def test_in_low_precision_it_is_still_its_own(name: str, dtype: torch.dtype) -> None:
    """Against the reference in float64, of the same rounded inputs; a part's own rounding is measured by itself."""
    truth = outputs_and_gradients(OWN[name], Case(9, 9), "reference", rounded=dtype)
    with rounded_at_every_step():
        rough = outputs_and_gradients(OWN[name], Case(9, 9), "reference", dtype)
    found = outputs_and_gradients(OWN[name], Case(9, 9), "auto", dtype)
    for what, value in truth.items():
        own = relative_error(rough[what], value)
        assert own < 32 * torch.finfo(dtype).eps
        assert relative_error(found[what], value) < 2 * own + 4 * torch.finfo(dtype).eps, what


@on_cpu
@pytest.mark.parametrize("name", OWN)
def test_our_kernels_compute_it_or_refuse_it(name: str) -> None:
    for impl in ("ragged", "linear"):
        if runs(OWN[name], Case(9, 9), impl, torch.float32):
            check(OWN[name], (9, 9, 8, 8), torch.float32, impl=impl, heads=HEADS)
        if runs(OWN[name], Case(9, 9, causal=True), impl, torch.float32):
            check(OWN[name], (9, 9, 8, 8), torch.float32, impl=impl, heads=HEADS, is_causal=True)


def test_every_part_computes_what_no_part_of_the_library_does() -> None:
    """Else the tests above could not fail."""
    q, k, v = (torch.randn(1, HEADS, 9, 4, dtype=torch.float64) for _ in range(3))
    outputs = [attention(q, k, v, primal, impl="reference") for primal in OWN.values()]
    plain = [attention(q, k, v, name, impl="reference") for name in ("softmax", "bn", "sh", "linear", "sparse")]
    for name, out in zip(OWN, outputs, strict=True):
        assert all(relative_error(out, other) > 1e-3 for other in plain), name


@pytest.mark.skipif(ON_CPU, reason="once is enough")
@pytest.mark.parametrize("name", [name for name in OWN if "learn" in name])
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_is_learned_and_not_given_has_its_initial_value(name: str, impl: str, dtype: torch.dtype) -> None:
    primal = OWN[name]
    q, k, v = (torch.randn(1, HEADS, 9, 4, dtype=dtype) for _ in range(3))
    initial = {n: x.to(dtype) for n, x in primal.learned(HEADS, 4).items()}
    assert initial
    out = attention(q, k, v, primal, impl=impl)
    assert out.dtype == dtype
    torch.testing.assert_close(out, attention(q, k, v, primal, impl=impl, parameters=initial), rtol=0, atol=0)
    moved = {n: x + 1 for n, x in initial.items()}
    assert not torch.equal(out, attention(q, k, v, primal, impl=impl, parameters=moved))
