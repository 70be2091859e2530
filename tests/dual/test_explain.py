"""The derivation says what was stated, what follows and what it costs."""

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from primaldual import MultiheadAttention, Primal, derive, mechanism, mechanisms
from primaldual.primal import (
    BatchNorm,
    DepthwiseConv1d,
    Exponential,
    FeatureMap,
    KernelSum,
    Laplace,
    PointMap,
    Recenter,
    RmsNorm,
    Rotary,
    Scale,
    Taylor,
)

SECTIONS = [
    "The primal layer", "The regression", "Stationarity of the Lagrangian", "The support vector expansion",
    "What is relaxed", "Exact rewrites", "Cost",
]  # fmt: skip


EXPLAINED = {name: mechanism(name) for name in mechanisms()} | {
    "positions": Primal(Laplace(), inputs=(DepthwiseConv1d(3, True, "each"), Rotary(), RmsNorm(), Scale(2.0, True))),
}


@pytest.mark.parametrize("format", ["text", "markdown", "latex"])
@pytest.mark.parametrize("name", EXPLAINED)
def test_every_mechanism_is_explained_step_by_step(name: str, format: str) -> None:
    said = derive(EXPLAINED[name]).explain(format)
    places = [said.index(title) for title in SECTIONS]
    assert places == sorted(places)
    if format != "text":  # braces, brackets and display formulas balance
        assert said.count("{") == said.count("}")
        assert len(re.findall(r"\\left", said)) == len(re.findall(r"\\right(?![a-z])", said))
        assert said.count("\\[") == said.count("\\]") and said.count("$$") % 2 == 0
        assert said.isascii(), {c for c in said if not c.isascii()}


def test_the_user_s_own_choices_are_filled_in() -> None:
    said = derive(mechanism("bn+sh", beta=0.6, scales=(1, 2))).explain()
    assert "softmax_j([q_i − 0.6μ]·[k_j − 0.6μ]/√D)" in said
    assert "softmax_j([q_i − 0.6μ]·k_j/√D)" in said  # after the row constants cancelled
    assert "scale 1, 2" in said and "2 heads" in said


def test_full_batch_norm_ends_as_a_query_only_map() -> None:
    said = derive(Primal(inputs=(BatchNorm(eps=1e-3),))).explain()
    assert "softmax_j([(q_i − μ) ⊙ (σ² + 0.001)^(−1)]·k_j/√D)" in said


def test_parts_of_one_s_own_appear_by_name() -> None:
    class Wave(FeatureMap):
        def features(self, x):
            return torch.cat([x.sin(), x.cos()], -1)

        def dim(self, head_dim):
            return 2 * head_dim

    class Bend(PointMap):
        def apply(self, x, moments, parameters):
            return x.tanh()

    said = derive(Primal(features=Wave(), inputs=(Bend(),))).explain()
    assert "Φ(x) = Wave(x)" in said and "Φ(Bend(q_i))·Φ(Bend(k_j))" in said and "Re-association" in said


def test_a_subclass_is_not_explained_as_its_parent() -> None:
    class Cooler(Exponential):
        def log_kernel(self, x, y):
            return 0.5 * super().log_kernel(x, y)

    class Doubled(KernelSum):
        def h(self, x, kernel_sum):
            return 2 * kernel_sum

    assert "softmax" not in derive(Primal(features=Cooler())).explain()
    said = derive(Primal(normalizer=Doubled())).explain()
    assert "softmax" not in said and "exp(" in said


def test_what_is_relaxed_depends_on_the_bias() -> None:
    assert "b = 0, so the centring constraint" in derive(Primal()).explain()
    assert "b is learned per head" in derive(Primal(bias=True)).explain()
    assert "box |v_j(d)| ≤ C/h(Tk_j) is dropped" in derive(Primal()).explain()


def test_an_unknown_format_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="text, markdown, latex; got 'html'"):
        derive(Primal()).explain("html")


@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "bn+sh", "linear", "linear-sh"])
def test_the_cost_is_what_torch_counts(name: str) -> None:
    """Matrix products of a layer, less the query and output projections."""
    length, heads, dim = 64, 8, 16
    layer = MultiheadAttention(heads * dim, heads, batch_first=True, mechanism=name)
    x = torch.randn(1, length, heads * dim)
    # the counter knows no formula for the CPU's fused kernel, so its plain products are counted
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        layer(x, x, x, need_weights=False)
    outer = 2 * 2 * length * (heads * dim) ** 2
    cost = derive(mechanism(name)).cost(queries=length, keys=length, heads=heads, head_dim=dim)
    assert cost.projection + cost.attention == pytest.approx(counter.get_total_flops() - outer, rel=0.03)


def test_rewrites_never_cost_more_and_pooled_heads_cost_what_the_arithmetic_says() -> None:
    shape = {"queries": 1024, "keys": 1024, "heads": 8, "head_dim": 64}
    for name in mechanisms():
        expansion = derive(mechanism(name))
        assert expansion.cost(**shape).total <= expansion.as_written.cost(**shape).total, name
    ratio = derive("sh").cost(**shape).attention / derive("softmax").cost(**shape).attention
    assert ratio == (1 + 1 / 2 + 1 / 4 + 1 / 8) / 4


def test_derive_takes_names_and_primals_alike() -> None:
    assert derive("bn") == derive(Primal(inputs=(Recenter(),), normalizer=KernelSum()))
    assert derive(Primal(features=Taylor(2))).primal.features == Taylor(2)
