"""What a layer's plan says is computed is what its route computes, and the attention inside it."""

import pytest
import torch

from nn.layers import make, reference_of
from primaldual import MultiheadAttention, mechanism
from primaldual.dual import Expansion, PoolBeforeProjection, RowConstantsCancel
from primaldual.ops import EXECUTORS, UnsupportedError, _attention
from primaldual.ops.layer import ROUTES, LayerProblem
from support.formulas import Called, in_place_of_kernels

SCALES = (1, 2, 2, 4)
LENGTH = 16

RUNS = {
    "separate": ("softmax", "bn", "bn+sh", "linear-bn+sh", "sparse-bn"),
    "pooled": ("sh", "bn+sh", "linear-bn+sh"),
    "recentred_projection": ("bn",),
    "unpooled": ("sh", "bn+sh"),
    "grouped": ("sh", "bn+sh"),
    "grouped_mixed": ("sh", "bn+sh"),
    "rotary": ("softmax", "bn", "bn+sh"),
}
"""For every route mechanisms that make use of all the identities that it knows."""

each_run = pytest.mark.parametrize(
    ("route", "name"), [(route, name) for route, names in RUNS.items() for name in names]
)


def test_every_route_is_held_to_what_is_said_of_it() -> None:
    assert RUNS.keys() == ROUTES.keys()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Called]:
    monkeypatch.setattr(_attention, "_known", {})  # calls of other tests
    return in_place_of_kernels(monkeypatch)


@pytest.fixture
def bound(kernels: list[Called], monkeypatch: pytest.MonkeyPatch) -> list[Expansion]:
    """The expansions that executors are given, from here on."""
    found: list[Expansion] = []
    for executor in EXECUTORS.values():
        run = executor.run
        monkeypatch.setattr(executor, "run", lambda p, run=run: found.append(p.expansion) or run(p))
    return found


def layer_of(name: str, route: str) -> MultiheadAttention:
    options = {"scales": SCALES} if "sh" in name else {}
    return make(
        mechanism(name, rotary=route == "rotary", **options, **({"stride": 3} if name.startswith("sparse") else {})),
        impl=route,
    )


def stated(layer: MultiheadAttention, x: torch.Tensor) -> LayerProblem:
    return layer.state(x, x, x, need_weights=False)


@each_run
def test_what_a_plan_says_is_what_the_route_and_the_attention_inside_are_given(
    route: str, name: str, bound: list[Expansion], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, given = layer_of(name, route), torch.randn(2, LENGTH, 16, dtype=torch.float64), []
    said = layer.plan(x).expansion
    run = ROUTES[route].run
    monkeypatch.setattr(ROUTES[route], "run", lambda p, expansion: given.append(expansion) or run(p, expansion))
    for _ in range(2):  # planned, then remembered
        layer(x, x, x, need_weights=False)
    assert given == [said] * 2
    inside = {rewrite for expansion in bound for rewrite in expansion.rewrites}
    assert {*ROUTES[route].rewrites(stated(layer, x)), *inside} >= set(said.rewrites) >= inside
    assert said.primal == layer.primal


@each_run
def test_without_a_rewrite_that_is_said_a_route_computes_something_else_or_nothing(
    route: str, name: str, kernels: list[Called], bound: list[Expansion]
) -> None:
    layer, x = layer_of(name, route), torch.randn(2, LENGTH, 16, dtype=torch.float64)
    p, own = stated(layer, x), layer.plan(x).expansion
    own = Expansion(own.primal, tuple(r for r in own.rewrites if r in ROUTES[route].rewrites(p)))
    reference = reference_of(layer)
    expected, _ = ROUTES["separate"].run(stated(reference, x), Expansion(layer.primal))

    def run(expansion: Expansion) -> tuple[int, list[Called]]:
        bound.clear()
        kernels.clear()
        out, _ = ROUTES[route].run(p, expansion)
        torch.testing.assert_close(out, expected)
        return len(bound), list(kernels)

    rewritten = run(own)
    for rewrite in own.rewrites:
        rest = Expansion(own.primal, tuple(other for other in own.rewrites if other is not rewrite))
        try:
            other = run(rest)
        except UnsupportedError as error:
            assert repr(rewrite.name) in str(error)
        else:
            assert other != rewritten, f"{rewrite.name} is said, and nothing depends on it"


@pytest.mark.parametrize("route", ["unpooled", "grouped", "grouped_mixed"])
@pytest.mark.parametrize("name", ["sh", "bn+sh"])
def test_kernels_of_layers_are_called_as_is_said(route: str, name: str, kernels: list[Called]) -> None:
    layer, x = layer_of(name, route), torch.randn(2, LENGTH, 16, dtype=torch.float64)
    said = layer.plan(x).expansion.rewrites
    layer(x, x, x, need_weights=False)
    assert kernels == [Called("layer", RowConstantsCancel in said, PoolBeforeProjection in said)]
