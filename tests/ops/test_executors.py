"""Every executor computes what the reference computes: outputs and all gradients, every mechanism, mask and shape."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from primaldual import Primal, attention
from primaldual.ops import EXECUTORS
from primaldual.primal import EluPlusOne, Pooled, RandomFeatures, Taylor
from primaldual.primal.features import FeatureMap
from support.battery import (
    CASES,
    FAST,
    GROUPED,
    ON_CUDA,
    PAIRS,
    PRIMALS,
    Case,
    outputs_and_gradients,
    relative_error,
    runs,
)

EXACT = 1e-9


@pytest.mark.parametrize(("name", "impl"), PAIRS)
def test_executor_equals_reference(name: str, impl: str) -> None:
    primal = PRIMALS[name]
    for case in CASES + GROUPED:
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
def test_low_precision_is_as_close_to_the_reference_in_float64_as_its_roundings_allow(
    name: str, impl: str, dtype: torch.dtype
) -> None:
    """Six tensors are handed on at the dtype, each rounded by half an eps, and as many gradients.

    They are mapped tokens, points and queries, scores, weights and the output.
    """
    case = Case(16, 16, "padding") if name == "conv2d" else Case(37, 37, "padding")
    truth = outputs_and_gradients(PRIMALS[name], case, "reference", rounded=dtype)
    found = outputs_and_gradients(PRIMALS[name], case, impl, dtype)
    for what, value in truth.items():
        assert relative_error(found[what], value) < 12 * torch.finfo(dtype).eps / 2, what


@dataclass(frozen=True)
class Square(FeatureMap):
    """Φ(x) = (1, x²)"""

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x[..., :1]), x.square()], -1)

    def dim(self, head_dim: int) -> int:
        return head_dim + 1


FINITE = [EluPlusOne(), RandomFeatures(64), Square(), Taylor(2)]


@pytest.mark.parametrize("autocast", [False, True], ids=["halves", "autocast"])
@pytest.mark.parametrize("features", FINITE, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize(("causal", "impl"), [(False, "linear"), (True, "linear"), (False, "reference")])
def test_sums_of_many_keys_do_not_leave_the_range_of_float16(
    features: FeatureMap, autocast: bool, causal: bool, impl: str
) -> None:
    generator, dim = torch.Generator().manual_seed(0), 16 if features == Taylor(2) else 64
    q, k, v = (torch.randn(1, 1, 2048, dim, generator=generator).half() for _ in range(3))
    q, k, v = (x.float() if autocast else x for x in (q, k, v))
    primal = Primal(features=features)
    truth = attention(q.double(), k.double(), v.double(), primal, is_causal=causal)
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        found = attention(q, k, v, primal, is_causal=causal, impl=impl)
    assert found.dtype == torch.float16
    assert relative_error(found, truth) < torch.finfo(torch.float16).eps


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("impl", ["sdpa", "dense"])
def test_sums_of_a_window_do_not_leave_the_range_of_float16(impl: str, causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    q, k, v = (x.half() for x in (q, k, v + 700))
    primal = Primal(training_set=Pooled((128, 128)))  # which does not divide 300
    truth = attention(q.double(), k.double(), v.double(), primal, is_causal=causal)
    found = attention(q, k, v, primal, is_causal=causal, impl=impl)
    assert relative_error(found, truth) < 4 * torch.finfo(torch.float16).eps
