"""Every stated thing is a value: frozen, hashable, comparable, printable, JSON both ways; so is a user's own."""

import json
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import primaldual.primal
from primaldual import Primal, attention, mechanism, mechanisms
from primaldual.primal import (
    AllKeys,
    BatchNorm,
    DepthwiseConv1d,
    DepthwiseConv2d,
    EluPlusOne,
    Exponential,
    FeatureMap,
    Fixed,
    Forget,
    Gated,
    Gaussian,
    KernelSum,
    Laplace,
    Normalizer,
    Pattern,
    PointMap,
    Points,
    Polynomial,
    Pooled,
    PositionMap,
    RandomFeatures,
    Recenter,
    RmsNorm,
    Rotary,
    Scale,
    Sparse,
    Spec,
    Strided,
    Taylor,
    TokenMap,
    TrainingSet,
    Unit,
    UnknownKindError,
    Window,
)

PARTS = [
    Exponential(),
    Taylor(3),
    EluPlusOne(),
    RandomFeatures(16, seed=7),
    Laplace(),
    Laplace((0.5, 0.25)),
    KernelSum(),
    KernelSum(1),
    KernelSum("learned"),
    Gated(),
    Gated(KernelSum("learned"), "channel"),
    Unit(),
    Gaussian(0.5),
    Polynomial(3, 0.0),
    Forget(),
    Recenter(0.3),
    Recenter(0.3, learnable=True),
    BatchNorm(1e-3, 0.5, True),
    RmsNorm(1e-4),
    Scale(2.0, learnable=True, per_head=False),
    Rotary(500.0, fraction=0.5),
    DepthwiseConv1d(4, causal=True),
    DepthwiseConv1d(4, channels="each"),
    DepthwiseConv2d((3, 2), grid=(4, 5), prefix=1),
    AllKeys(),
    Pooled(),
    Pooled((1, 2, 4), how="max", prefix=2),
    Pooled((2, 2), grid=(4, 6)),
    Sparse(),
    Sparse(Fixed(8, 2), Pooled((1, 2))),
    Strided(5),
    Fixed(4),
    Window(0),
    Primal(Taylor(2), Unit(), (DepthwiseConv1d(3), BatchNorm()), Sparse(Window(3)), bias=True, residual=True),
]


@dataclass(frozen=True)
class ShiftedSquare(FeatureMap):
    shift: float = 0.5

    def features(self, x: Tensor) -> Tensor:
        return x.square() + self.shift

    def dim(self, head_dim: int) -> int:
        return head_dim


@dataclass(frozen=True)
class PowerOfSum(Normalizer):
    power: float = 0.5

    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        return kernel_sum**self.power


@dataclass(frozen=True)
class SpreadByMean(PointMap):
    """Divides by what is far from the mean key; the moments reach a map of any form."""

    needs: ClassVar = "mean"
    strength: float = 2.0

    def apply(self, x: Tensor, moments, parameters) -> Tensor:
        return x / (1 + self.strength * (x - moments.mean).square())


@dataclass(frozen=True)
class ShiftByLearned(PointMap):
    by_head: ClassVar = ("offset",)
    needs: ClassVar = "mean"
    scale: float = 3.0

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"offset": torch.zeros(heads)}

    def affine(self, moments, parameters):
        offset = parameters["offset"].reshape(-1, *(1,) * (moments.mean.dim() - 2))
        return offset, torch.full_like(offset, self.scale)


@dataclass(frozen=True)
class AddPrevious(TokenMap):
    weight: float = 0.5

    def causal_refusal(self) -> str | None:
        return None

    def tokens(self, x: Tensor, parameters) -> Tensor:
        return x + self.weight * torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :]], dim=-2)


@dataclass(frozen=True)
class EveryNth(TrainingSet):
    step: int = 2

    def reduce(self, keys: Tensor, values: Tensor, seen: Tensor, scale: int, parameters) -> Points:
        kept = slice(None, None, self.step)
        share = torch.eye(keys.shape[-2], dtype=keys.dtype)[kept].expand(*seen[..., kept].shape, -1)
        return Points(keys[:, :, None, kept], values[:, :, None, kept], seen[..., kept], share)

    def points(self, scale: int, tokens: int) -> int:
        return -(-tokens // self.step)


@dataclass(frozen=True)
class SameParity(Pattern):
    modulus: int = 2

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return i % self.modulus == j % self.modulus


OWN = {
    "features": Primal(features=ShiftedSquare(0.25)),
    "normalizer": Primal(normalizer=PowerOfSum(0.7)),
    "normalizer of finite features": Primal(EluPlusOne(), PowerOfSum(0.7)),
    "point map": Primal(inputs=(SpreadByMean(1.5),)),
    "point map before another": Primal(inputs=(SpreadByMean(1.5), Recenter(0.5))),
    "token map": Primal(inputs=(AddPrevious(0.75),)),
    "training set": Primal(training_set=EveryNth(3)),
    "training set of finite features": Primal(EluPlusOne(), training_set=EveryNth(3)),
    "pattern": Primal(training_set=Sparse(SameParity(3))),
}


def through_json(spec: Spec) -> Spec:
    return Spec.from_dict(json.loads(json.dumps(spec.to_dict())))


@pytest.mark.parametrize("spec", PARTS, ids=repr)
def test_a_part_comes_back_from_json_as_it_was(spec):
    back = through_json(spec)
    assert back == spec
    assert type(back) is type(spec)
    assert hash(back) == hash(spec)


@pytest.mark.parametrize("name", mechanisms())
def test_a_mechanism_comes_back_from_json_as_it_was(name):
    assert through_json(mechanism(name)) == mechanism(name)


@given(
    st.builds(
        Primal,
        features=st.one_of(
            st.just(Exponential()),
            st.builds(Taylor, st.integers(0, 5)),
            st.builds(RandomFeatures, st.integers(1, 99), st.integers(0, 2**31)),
        ),
        normalizer=st.sampled_from([KernelSum(), KernelSum(0.5), Gated(KernelSum("learned")), Unit()]),
        inputs=st.one_of(
            st.just(()),
            st.tuples(st.builds(Recenter, st.floats(-10, 10), st.booleans())),
            st.tuples(
                st.builds(DepthwiseConv1d, st.integers(1, 9), st.booleans()), st.builds(RmsNorm, st.floats(0, 1))
            ),
        ),
        training_set=st.one_of(
            st.builds(Pooled, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(["mean", "conv"])),
            st.builds(Sparse, st.builds(Window, st.integers(0, 9)), st.builds(Pooled, prefix=st.integers(0, 3))),
        ),
        bias=st.booleans(),
        residual=st.booleans(),
    )
)
def test_any_primal_comes_back_from_json_as_it_was(primal):
    assert through_json(primal) == primal


def test_different_parts_are_different_values():
    assert len(set(PARTS)) == len(PARTS)
    assert len({mechanism(name) for name in mechanisms()}) == len(mechanisms())


@pytest.mark.parametrize("spec", PARTS, ids=repr)
def test_a_part_cannot_be_changed(spec):
    for name in [field.name for field in fields(spec)] + ["something_new"]:
        with pytest.raises(FrozenInstanceError):
            setattr(spec, name, None)


@pytest.mark.parametrize("spec", [*PARTS, *map(mechanism, mechanisms())], ids=repr)
def test_what_is_printed_is_the_code_that_makes_it(spec):
    assert eval(repr(spec), vars(primaldual.primal)) == spec


@pytest.mark.parametrize("spec", PARTS, ids=repr)
def test_every_part_says_what_it_is_in_one_line(spec):
    for said in (spec.text(), spec.latex()):
        assert said
        assert "\n" not in said


def test_a_part_with_nothing_to_say_is_its_name_at_the_point():
    assert ShiftedSquare(0.25).text("q") == "ShiftedSquare(q)"
    assert ShiftedSquare(0.25).latex("q") == r"\mathrm{ShiftedSquare}(q)"


def test_what_a_part_was_given_since_is_recorded_where_it_is_used():
    assert DepthwiseConv1d(4).to_dict() == {"kind": "DepthwiseConv1d", "size": 4, "causal": False}
    assert DepthwiseConv1d(4, channels="each").to_dict()["channels"] == "each"


@pytest.mark.parametrize("primal", OWN.values(), ids=OWN)
def test_a_users_own_part_comes_back_from_json_as_it_was(primal):
    assert through_json(primal) == primal


@pytest.mark.parametrize("primal", OWN.values(), ids=OWN)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_users_own_part_runs_in_the_reference_and_in_what_auto_picks(primal, padded):
    q, k, v = torch.randn(3, 2, 2, 7, 4, dtype=torch.float64)
    mask = torch.arange(7) >= torch.tensor([[7], [4]]) if padded else None
    reference = attention(q, k, v, primal, key_padding_mask=mask, impl="reference")
    torch.testing.assert_close(attention(q, k, v, primal, key_padding_mask=mask), reference, rtol=1e-9, atol=1e-9)


def test_a_users_own_features_give_the_kernel_they_span():
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    kernel = (q.square() + 0.25) @ (k.square() + 0.25).transpose(-1, -2)
    expected = kernel @ v / kernel.sum(-1, keepdim=True)
    torch.testing.assert_close(attention(q, k, v, Primal(features=ShiftedSquare(0.25))), expected, rtol=1e-9, atol=1e-9)


def test_a_users_own_normalizer_divides_the_sum():
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    kernel = (q @ k.transpose(-1, -2) / 2).exp()
    expected = kernel @ v / kernel.sum(-1, keepdim=True) ** 0.7
    torch.testing.assert_close(attention(q, k, v, Primal(normalizer=PowerOfSum(0.7))), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_users_own_map_is_applied_to_queries_and_keys(impl):
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    mean = k.mean(2, keepdim=True)
    q_, k_ = (x / (1 + 1.5 * (x - mean).square()) for x in (q, k))
    expected = (q_ @ k_.transpose(-1, -2) / 2).softmax(-1) @ v
    out = attention(q, k, v, Primal(inputs=(SpreadByMean(1.5),)), impl=impl)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_what_a_users_own_map_learns_arrives_by_name_one_per_head(impl):
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    offset = torch.tensor([0.1, -2.0, 1.0], dtype=torch.float64)
    q_, k_ = ((x - offset[:, None, None]) * 3.0 for x in (q, k))
    expected = (q_ @ k_.transpose(-1, -2) / 2).softmax(-1) @ v
    out = attention(q, k, v, Primal(inputs=(ShiftByLearned(3.0),)), parameters={"offset": offset}, impl=impl)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_users_own_token_map_acts_before_the_scores(impl):
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    q_, k_ = (x + 0.75 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :, :-1] for x in (q, k))
    expected = (q_ @ k_.transpose(-1, -2) / 2).softmax(-1) @ v
    out = attention(q, k, v, Primal(inputs=(AddPrevious(0.75),)), impl=impl)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_users_own_training_set_is_what_the_heads_see(impl):
    q, k, v = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64)
    expected = (q @ k[:, :, ::3].transpose(-1, -2) / 2).softmax(-1) @ v[:, :, ::3]
    out = attention(q, k, v, Primal(training_set=EveryNth(3)), impl=impl)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_users_own_pattern_picks_the_keys_of_each_query(impl):
    q, k, v = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64)
    index = torch.arange(7)
    hidden = index[:, None] % 3 != index % 3
    expected = (q @ k.transpose(-1, -2) / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    out = attention(q, k, v, Primal(training_set=Sparse(SameParity(3))), impl=impl)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_a_users_own_training_set_has_no_causal_form_until_it_says_so():
    q = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match="EveryNth does not say what its points are when later tokens are hidden"):
        attention(q, q, q, Primal(training_set=EveryNth()), is_causal=True)


@pytest.mark.parametrize(
    ("base", "call"),
    [
        (FeatureMap, lambda s: s.features(torch.ones(1, 1))),
        (FeatureMap, lambda s: s.dim(1)),
        (Normalizer, lambda s: s.h(torch.ones(1, 1), torch.ones(1, 1))),
        (PointMap, lambda s: s.apply(torch.ones(1, 1), None, {})),
        (TokenMap, lambda s: s.tokens(torch.ones(1, 1), {})),
        (PositionMap, lambda s: s.tokens(torch.ones(1, 1), {})),
        (Pattern, lambda s: s.allows(torch.ones(1), torch.ones(1), 1)),
    ],
    ids=["features", "dim", "h", "apply", "tokens", "at", "allows"],
)
def test_a_base_class_names_the_method_that_is_missing(base, call):
    with pytest.raises(NotImplementedError, match=f"{base.__name__} must implement"):
        call(base())


def test_an_unknown_kind_is_an_error_that_names_the_nearest():
    with pytest.raises(UnknownKindError, match=r"no class 'Recentre' is defined here; did you mean 'Recenter'"):
        Spec.from_dict({"kind": "Recentre", "beta": 1.0})


def test_an_unknown_field_is_an_error_that_names_what_exists():
    with pytest.raises(ValueError, match=r"Recenter has no field \['bta'\]; it has \['beta', 'learnable'\]"):
        Spec.from_dict({"kind": "Recenter", "bta": 1.0})


def test_a_missing_field_is_an_error_that_names_it():
    with pytest.raises((TypeError, ValueError), match="count"):
        Spec.from_dict({"kind": "RandomFeatures"})


@pytest.mark.parametrize("data", [[], "Recenter", {}, {"beta": 1.0}, None], ids=repr)
def test_what_is_no_serialised_spec_is_refused(data):
    with pytest.raises(ValueError, match="expected a mapping with a 'kind'"):
        Spec.from_dict(data)


def test_a_serialised_part_is_not_taken_for_another():
    with pytest.raises(ValueError, match="expected a Pattern, got a serialised Recenter"):
        Pattern.from_dict(Recenter().to_dict())


def test_fields_may_be_left_out_when_they_have_defaults():
    assert Primal.from_dict({"kind": "Primal"}) == Primal()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": Recenter()}, "inputs must be a tuple of input maps"),
        ({"inputs": (Exponential(),)}, "every input map must be a TokenMap or a PointMap"),
        ({"features": KernelSum()}, "features must be a FeatureMap"),
        ({"normalizer": Exponential()}, "normalizer must be a Normalizer"),
        ({"training_set": Strided()}, "training_set must be a TrainingSet"),
        ({"inputs": (Recenter(), DepthwiseConv1d())}, "the former must come first"),
        ({"inputs": (Recenter(1.0, True), BatchNorm(learnable=True))}, "same name, .*'beta'"),
    ],
    ids=["one map", "no map", "features", "normalizer", "training set", "order", "same name"],
)
def test_a_primal_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Primal(**arguments)


def test_inputs_may_be_given_as_a_list():
    assert Primal(inputs=[Recenter()]) == Primal(inputs=(Recenter(),))


def nested(levels: int) -> dict:
    data: dict = {"kind": "AllKeys"}
    for _ in range(levels):
        data = {"kind": "Sparse", "over": data}
    return data


NO_SPECS = {
    "a kind that is no word": ({"kind": ["Primal"]}, "expected a mapping with a 'kind'"),
    "a switch that is none": ({"kind": "Primal", "bias": "yes"}, "bias must be True or False, got 'yes'"),
    "a switch that is a number": ({"kind": "Primal", "residual": 2**31}, "residual must be True or False"),
    "learnable": ({"kind": "Recenter", "learnable": 1}, "learnable must be True or False"),
    "thousands of levels": ({"kind": "Primal", "training_set": nested(5000)}, "more than 64 levels deep"),
    "a kernel beyond memory": ({"kind": "DepthwiseConv1d", "size": 2**40}, "at most 65,536"),
    "a square kernel beyond memory": ({"kind": "DepthwiseConv2d", "size": [2**20, 2**20]}, "at most 65,536"),
    "features beyond memory": ({"kind": "RandomFeatures", "count": 2**40}, "at most 65,536"),
    "windows beyond memory": ({"kind": "Pooled", "scales": [2**40], "how": "conv"}, "at most 65,536"),
    "a number that fits nowhere": ({"kind": "Recenter", "beta": 10**400}, "bits is too large"),
    "a list for a number": ({"kind": "Recenter", "beta": [1.0]}, "beta must be a finite number"),
    "maps that are none": ({"kind": "Primal", "inputs": 3}, "there is no such Primal: .* inputs must be a tuple"),
    "features that are none": ({"kind": "Primal", "features": "exp"}, "features must be a FeatureMap"),
    "a seed that is none": ({"kind": "RandomFeatures", "count": 4, "seed": -1}, "seed must be an integer"),
}


@pytest.mark.parametrize("name", NO_SPECS)
def test_what_is_no_spec_is_a_value_error_that_says_why(name):
    data, message = NO_SPECS[name]
    with pytest.raises(ValueError, match=message):
        Spec.from_dict(data)


def test_a_degree_beyond_any_number_of_features_is_refused_at_once():
    with pytest.raises(ValueError, match="at least"):
        Taylor(2**60).dim(8)


@pytest.mark.parametrize("switch", ["bias", "residual"])
def test_switches_of_a_primal_are_true_or_false(switch):
    with pytest.raises(ValueError, match=f"{switch} must be True or False, got 1"):
        Primal(**{switch: 1})
