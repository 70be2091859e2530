"""Every executor computes what the reference computes: outputs and all gradients, every mechanism, mask and shape."""

import pytest
import torch

from primaldual.ops import EXECUTORS
from support.battery import CASES, FAST, ON_CUDA, PAIRS, PRIMALS, Case, outputs_and_gradients, relative_error, runs

EXACT = 1e-9


@pytest.mark.parametrize(("name", "impl"), PAIRS)
def test_executor_equals_reference(name: str, impl: str) -> None:
    primal = PRIMALS[name]
    for case in CASES:
        if not runs(primal, case, impl):
            continue
        truth = outputs_and_gradients(primal, case, "reference")
        found = outputs_and_gradients(primal, case, impl)
        for what, value in truth.items():
            assert found[what].isfinite().all(), f"{case}: {what} is not finite"
            assert relative_error(found[what], value) < EXACT, f"{case}: {what}"


def test_every_mechanism_runs_on_something_faster_than_the_reference() -> None:
    assert set(PRIMALS) == {name for name, _ in PAIRS}
    assert {impl for _, impl in PAIRS} == set(FAST)
    assert {*FAST, *ON_CUDA, "reference"} == set(EXECUTORS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("name", "impl"), PAIRS)
def test_low_precision_stays_within_twice_the_reference_s_own_error(name: str, impl: str, dtype: torch.dtype) -> None:
    """The budget is measured: how far the reference is off at this dtype, from the same rounded inputs."""
    case = Case(16, 16, "padding") if name == "conv2d" else Case(37, 37, "padding")
    truth = outputs_and_gradients(PRIMALS[name], case, "reference", rounded=dtype)
    rough = outputs_and_gradients(PRIMALS[name], case, "reference", dtype)
    found = outputs_and_gradients(PRIMALS[name], case, impl, dtype)
    for what, value in truth.items():
        budget = 2 * relative_error(rough[what], value) + 4 * torch.finfo(dtype).eps
        assert relative_error(found[what], value) < budget, what
