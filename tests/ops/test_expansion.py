"""What a plan says is computed is what is computed."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from primaldual import MultiheadAttention, Primal, derive, mechanism
from primaldual.dual import (
    Expansion,
    GroupHeadsByScale,
    KeepPattern,
    PoolBeforeProjection,
    Reassociate,
    Rewrite,
    RowConstantsCancel,
)
from primaldual.ops import EXECUTORS, UnsupportedError, _attention, attention, plan, ragged
from primaldual.ops.plan import execute
from primaldual.ops.problem import Problem, state
from primaldual.primal import EluPlusOne, PointMap, Points, Pooled, Sparse, TrainingSet, Window
from primaldual.primal.features import FeatureMap
from support.formulas import in_place_of_kernels

QUERIES, KEYS = 5, 7


def problem(primal: Primal, queries: int = QUERIES, keys: int = KEYS) -> Problem:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, n, 8, generator=generator) for n in (queries, keys, keys))
    return state(q, k, v, primal)


def said(p: Problem, impl: str) -> tuple[type[Rewrite], ...]:
    return plan(p.q, p.k, p.v, p.primal, impl=impl).expansion.rewrites


@pytest.mark.parametrize("impl", ["reference", "linear"])
def test_re_association_is_said_exactly_where_no_score_is_computed(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, scored, kernel = problem(Primal(features=EluPlusOne())), [], FeatureMap.kernel
    monkeypatch.setattr(FeatureMap, "kernel", lambda *x: scored.append(x) or kernel(*x))
    execute(p, impl)
    assert (Reassociate in said(p, impl)) == (not scored) == (impl == "linear")


@dataclass(frozen=True)
class TwoScales(TrainingSet):
    """All tokens, for heads that are said to have two scales."""

    def head_scales(self, heads: int) -> tuple[int, ...]:
        return (1, 2) * (heads // 2)

    def reduce(self, keys: Tensor, *rest: object) -> Points:
        CALLS.append(keys.shape[1])
        return super().reduce(keys, *rest)  # type: ignore[arg-type]


CALLS: list[int] = []
"""Heads of every call of `TwoScales.reduce`."""


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_heads_are_said_to_be_grouped_where_they_are(impl: str) -> None:
    p = problem(Primal(training_set=TwoScales()))
    CALLS.clear()
    execute(p, impl)
    assert CALLS == [2, 2] and GroupHeadsByScale in said(p, impl)


@pytest.mark.parametrize(("impl", "columns"), [("reference", 16), ("block_sparse", 2)])
def test_only_the_pattern_s_pairs_is_said_exactly_where_fewer_scores_are_computed(impl: str, columns: int) -> None:
    p = problem(Primal(training_set=Sparse(Window(0))), 16, 16)
    with FlopCounterMode(display=False) as counter:
        execute(p, impl)
    assert counter.get_total_flops() == 2 * 2 * 4 * 16 * columns * 8
    assert (KeepPattern in said(p, impl)) == (columns < 16)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_row_constants_are_said_to_cancel_exactly_where_keys_are_left_alone(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, mapped = problem(mechanism("bn")), []
    apply, query = PointMap.apply, RowConstantsCancel.query  # of the base class: a re-centring with its own is another
    monkeypatch.setattr(PointMap, "apply", lambda self, x, *rest: mapped.append(x.shape[-2]) or apply(self, x, *rest))
    monkeypatch.setattr(
        RowConstantsCancel, "query", staticmethod(lambda q, *rest: mapped.append(q.shape[-2]) or query(q, *rest))
    )
    execute(p, impl)
    assert QUERIES in mapped
    assert (RowConstantsCancel in said(p, impl)) == (KEYS not in mapped) == (impl == "sdpa")


def test_an_executor_computes_the_expansion_that_it_is_given() -> None:
    p = problem(mechanism("bn", full=True))
    rewritten, _ = execute(p, "sdpa")
    written, _ = EXECUTORS["sdpa"].run(replace(p, expansion=p.expansion.as_written))
    torch.testing.assert_close(written, rewritten, atol=1e-5, rtol=1e-5)
    assert not torch.equal(written, rewritten)  # other operations, other rounding


@pytest.mark.parametrize(("route", "projected"), [("separate", 40), ("pooled", 20)])
def test_a_layer_says_that_it_pools_its_inputs_exactly_where_it_projects_fewer(route: str, projected: int) -> None:
    primal = Primal(training_set=Pooled((2, 2)))
    layer = MultiheadAttention(16, 2, batch_first=True, mechanism=primal, impl=route).eval()
    x = torch.randn(1, 40, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x, x, x, need_weights=False)
    in_and_out = 40 + 40
    assert counter.get_flop_counts()["Global"][torch.ops.aten.addmm] == 2 * 16 * 16 * (in_and_out + 2 * projected)
    assert (PoolBeforeProjection in layer.plan(x).expansion.rewrites) == (projected < 40)


def test_an_explanation_ends_with_the_rewrites_that_are_executed() -> None:
    x = torch.randn(1, 4, 16, 8)
    chosen = plan(x, x, x, "bn+sh", impl="sdpa")
    assert "  rewrites: row constants cancel; heads grouped by scale" in chosen.explain().splitlines()
    assert "none, the sum as it is written" in plan(x, x, x, "softmax", impl="reference").explain()
    derivation = chosen.expansion.explain()
    assert "Row constants cancel:" in derivation and "Pool before the projection:" not in derivation


@pytest.mark.parametrize("name", ["softmax", "bn", "bn+sh", "linear-bn+sh", "sparse-bn"])
def test_every_rewrite_that_a_derivation_prints_is_made_use_of_somewhere(name: str) -> None:
    p = problem(mechanism(name, **({"scales": (1, 2, 2, 4)} if "sh" in name else {})), 16, 16)
    used = {r for impl in EXECUTORS if EXECUTORS[impl].refusal(p) is None for r in said(p, impl)}
    layer = MultiheadAttention(32, 4, mechanism=p.primal)
    assert used | set(layer.plan(torch.randn(16, 1, 32)).expansion.rewrites) == set(derive(p.primal).rewrites)


SCALES = (1, 2, 2, 4)
RUNS = {
    "linear": ("linear", "linear-bn", "linear-bn+sh"),
    "block_sparse": ("sparse", "sparse-bn", "sparse-bn+sh"),
    "recentred": ("bn",),
    "sdpa": ("softmax", "bn", "bn+sh", "sparse-bn+sh"),
    "ragged": ("softmax", "bn", "sh", "bn+sh"),
    "mixed": ("sh", "bn+sh"),
    "dense": ("softmax", "bn", "bn+sh", "linear-bn", "sparse-bn+sh"),
    "reference": ("softmax", "bn+sh", "linear", "sparse-bn"),
}
"""For every executor mechanisms that make use of all the identities that it knows."""


def test_every_executor_is_held_to_what_is_said_of_it() -> None:
    assert RUNS.keys() == EXECUTORS.keys()


def primal_of(name: str) -> Primal:
    options: dict[str, Any] = {"scales": SCALES} if "sh" in name else {}
    return mechanism(name, **options, **({"stride": 3} if name.startswith("sparse") else {}))


def inputs(primal: Primal) -> Problem:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 4, 16, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    return state(*x, primal)


class Operators(TorchDispatchMode):
    """The operators that run, and the shapes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.ran.append((str(func), [tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)]))
        return out


@pytest.mark.parametrize(("impl", "name"), [(impl, name) for impl, names in RUNS.items() for name in names])
def test_without_a_rewrite_that_is_said_something_else_runs_or_nothing(
    impl: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = in_place_of_kernels(monkeypatch)
    p = inputs(primal_of(name))
    expected, _ = execute(p, "reference")
    expansion = plan(p.q, p.k, p.v, p.primal, impl=impl).expansion

    def run(rewrites: tuple[type[Rewrite], ...]) -> list[object]:
        called.clear()
        with Operators() as operators:
            out, _ = EXECUTORS[impl].run(replace(p, expansion=Expansion(p.primal, rewrites)))
        torch.testing.assert_close(out, expected)
        return [*operators.ran, *called]

    run(expansion.rewrites)  # some tensors are made once
    rewritten = run(expansion.rewrites)
    assert run(expansion.rewrites) == rewritten
    for rewrite in expansion.rewrites:
        rest = tuple(other for other in expansion.rewrites if other is not rewrite)
        try:
            other = run(rest)
        except UnsupportedError as error:
            assert repr(rewrite.name) in str(error)
        else:
            assert other != rewritten, f"{rewrite.name} is said, and nothing depends on it"


@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "padded"])
@pytest.mark.parametrize(("impl", "name"), [(impl, name) for impl, names in RUNS.items() for name in names])
def test_what_a_plan_says_is_bound_and_is_asked_once(
    impl: str, name: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if masked and impl in ("recentred", "mixed"):
        pytest.skip("has no form for masks")
    if masked and impl == "ragged" and "sh" in name:
        pytest.skip("pools padded tokens in a kernel")
    in_place_of_kernels(monkeypatch)
    p, module, bound, asked = inputs(primal_of(name)), EXECUTORS[impl], [], []
    mask = {"key_padding_mask": torch.arange(16)[None] >= 14} if masked else {}
    expected = plan(p.q, p.k, p.v, p.primal, impl=impl, **mask).expansion
    run, rewrites, direct = module.run, module.rewrites, ragged.direct
    monkeypatch.setattr(module, "run", lambda p: bound.append(p.expansion) or run(p))
    monkeypatch.setattr(module, "rewrites", lambda p: asked.append(p) or rewrites(p))
    monkeypatch.setattr(ragged, "direct", lambda p: bound.append(p.expansion) or direct(p))
    monkeypatch.setattr(_attention, "_known", {})
    for _ in range(2):
        attention(p.q, p.k, p.v, p.primal, impl=impl, **mask)  # type: ignore[arg-type]
    assert bound and all(expansion == expected for expansion in bound)
    assert len(asked) == (2 if masked else 1)  # a call without masks is remembered


@pytest.mark.parametrize("name", ["bn", "bn+sh"])
@pytest.mark.parametrize("impl", ["sdpa", "dense", "ragged"])
def test_a_causal_map_of_both_sides_is_never_taken_for_one_of_the_queries(impl: str, name: str) -> None:
    q, k, v = (torch.randn(1, 4, 8, 8, dtype=torch.float64) for _ in range(3))
    p = state(q, k, v, primal_of(name), is_causal=True)
    written = replace(p, expansion=p.expansion.rewritten(GroupHeadsByScale))
    if impl == "dense" and name == "bn":  # each query has keys of its own, one by one
        torch.testing.assert_close(EXECUTORS[impl].run(written), execute(p, "reference"))
    else:
        with pytest.raises(UnsupportedError, match="each query would need its own keys"):
            EXECUTORS[impl].run(written)
