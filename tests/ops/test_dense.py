"""The executor of weights: they are the reference's, and nothing is larger than they are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from primaldual import MultiheadAttention, attention, mechanism, mechanisms
from primaldual.ops import plan
from primaldual.ops.plan import execute
from primaldual.ops.problem import Problem, state
from primaldual.primal import EluPlusOne, Exponential, Pooled, Primal
from support.battery import CASES, HEADS, PRIMALS, exists, inputs, parameters, relative_error, runs
from support.watch import Watch

WITH_WEIGHTS = [name for name in PRIMALS if name not in ("sh-max", "sh-conv")]


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_weights_and_their_gradients_are_the_reference_s(name: str) -> None:
    primal = PRIMALS[name]
    for case in CASES:
        if not (exists(primal, case) and runs(primal, case, "dense")):
            continue
        found = {}
        for impl in ("reference", "dense"):
            qkv, masks = inputs(case)
            learned = parameters(primal, case)
            _, weights = attention(*qkv, primal, impl=impl, parameters=learned, need_weights=True, **masks)
            up = torch.randn(weights.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            leaves = [*qkv, *learned.values()]
            gradients = torch.autograd.grad((weights * up).sum(), leaves, allow_unused=True)
            zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))
            found[impl] = [weights.detach(), *zeros]
        for mine, truth in zip(found["dense"], found["reference"], strict=True):
            assert mine.isfinite().all()
            assert relative_error(mine, truth) < 1e-9, case


@pytest.mark.parametrize("mask", ["none", "causal", "attn_mask"])
@pytest.mark.parametrize("name", [*mechanisms(), "full bn+sh"])
def test_no_tensor_of_the_default_call_is_larger_than_the_weights(name: str, mask: str) -> None:
    length, dim = 64, 8
    primal = mechanism("bn+sh", full=True) if name == "full bn+sh" else mechanism(name)
    if mask == "causal" and primal.causal_refusal(HEADS):
        pytest.skip("it has no causal form")
    pooled = any(scale > 1 for scale in primal.training_set.head_scales(HEADS))
    if mask == "attn_mask" and (primal.mixing_maps or pooled):
        pytest.skip("it takes no mask for each query")
    layer = MultiheadAttention(HEADS * dim, HEADS, batch_first=True, mechanism=primal)
    x = torch.randn(1, length, HEADS * dim, requires_grad=True)
    hidden = (torch.rand(length, length) < 0.3).fill_diagonal_(False)
    with Watch() as watch:
        out, weights = layer(x, x, x, is_causal=mask == "causal", attn_mask=hidden if mask == "attn_mask" else None)
        (out.sum() + weights.square().sum()).backward()
    assert watch.largest <= 4 * HEADS * length * length


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("needed", [False, True], ids=["outputs", "weights"])
@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "bn+sh", "linear", "sparse"])
def test_the_plan_says_what_moves_within_a_factor_of_two(name: str, needed: bool, causal: bool) -> None:
    q, k, v = torch.randn(3, 1, 8, 256, 32)
    with Watch() as watch:
        attention(q, k, v, name, impl="dense", need_weights=needed, is_causal=causal)
    said = plan(q, k, v, name, impl="dense", need_weights=needed, is_causal=causal).estimates["dense"].bytes
    assert 0.5 < watch.moved / said < 2.0


@pytest.mark.parametrize("name", ["linear-bn", "bn-then-rms"])
def test_the_plan_says_what_keys_of_one_s_own_move(name: str) -> None:
    q, k, v = torch.randn(3, 1, HEADS, 64, 16)
    hidden = torch.rand(64, 64) < 0.3
    with Watch() as watch:
        attention(q, k, v, PRIMALS[name], impl="dense", attn_mask=hidden)
    said = plan(q, k, v, PRIMALS[name], impl="dense", attn_mask=hidden).estimates["dense"].bytes
    assert 0.5 < watch.moved / said < 2.0, watch.moved / said


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "linear"])
def test_the_plan_knows_what_the_reference_moves(name: str, causal: bool) -> None:
    q, k, v = torch.randn(3, 1, 8, 64, 16)
    with Watch() as watch:
        attention(q, k, v, name, impl="reference", need_weights=True, is_causal=causal)
    said = plan(q, k, v, name, impl="reference", need_weights=True, is_causal=causal).estimates["reference"].bytes
    assert 1 / 3 < watch.moved / said < 3.0


def repeated(problem: Problem, impl: str) -> Tensor:
    """Weights over tokens, each with that of its whole window."""
    weights = execute(replace(problem, repeat_weights=True), impl)[1]
    assert weights is not None
    return weights


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_repeated_weights_are_the_reference_s(name: str) -> None:
    primal = PRIMALS[name]
    for case in CASES:
        if not (exists(primal, case) and runs(primal, case, "dense")):
            continue
        qkv, masks = inputs(case)
        problem = state(*qkv, primal, parameters=parameters(primal, case), need_weights=True, **masks)
        torch.testing.assert_close(repeated(problem, "dense"), repeated(problem, "reference"), msg=str(case))


@pytest.mark.parametrize("how", ["mean", "max", "conv"])
def test_a_repeated_weight_is_that_of_the_pooled_point_for_each_of_its_tokens(how: str) -> None:
    q, k, v = torch.randn(3, 2, HEADS, 7, 4, dtype=torch.float64)
    primal = Primal(training_set=Pooled((3,) * HEADS, how=how))
    problem = state(q, k, v, primal, need_weights=True)
    points = primal.training_set.reduce(k, v, torch.ones(1, 1, 1, 7, dtype=torch.bool), 3, {})
    _, weights = attention(q, points.keys.squeeze(2), points.values.squeeze(2), "softmax", need_weights=True)
    torch.testing.assert_close(repeated(problem, "dense"), weights.repeat_interleave(3, -1)[..., :7])


def test_a_kernel_of_one_s_own_is_left_to_the_reference() -> None:
    class Cooler(Exponential):
        def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
            return 0.5 * super().log_kernel(x, y)

    class Squared(EluPlusOne):
        def kernel(self, x: Tensor, y: Tensor, parameters=None) -> Tensor:
            return super().kernel(x, y, parameters).square()

    q = torch.randn(1, 2, 5, 4)
    for features in (Cooler(), Squared()):
        assert plan(q, q, q, Primal(features), need_weights=True).impl == "reference"


def test_dropped_weights_are_the_ones_returned() -> None:
    q, k, v = torch.randn(3, 1, 4, 64, 8, dtype=torch.float64)
    for name in ("softmax", "bn", "sh"):
        for causal in (False, True):
            out, weights = attention(q, k, v, name, impl="dense", dropout_p=0.5, need_weights=True, is_causal=causal)
            torch.testing.assert_close(weights @ v, out, rtol=0, atol=1e-12)
            assert 0.2 < (weights == 0).double().mean() - (0.5 if causal else 0.0) * 0.5 < 0.8
