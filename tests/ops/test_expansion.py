"""What a plan says is computed is what is computed."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from primaldual import MultiheadAttention, Primal, derive, mechanism
from primaldual.dual import (
    GroupHeadsByScale,
    KeepPattern,
    PoolBeforeProjection,
    Reassociate,
    Rewrite,
    RowConstantsCancel,
)
from primaldual.ops import EXECUTORS, plan
from primaldual.ops.plan import execute
from primaldual.ops.problem import Problem, state
from primaldual.primal import EluPlusOne, PointMap, Points, Pooled, Sparse, TrainingSet, Window
from primaldual.primal.features import FeatureMap

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
