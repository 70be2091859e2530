"""Sinks, gates, kernels and weights of points against their formulas, written out here once more."""

import math

import pytest
import torch
from torch import Tensor

from primaldual import MultiheadAttention, Primal, attention, derive
from primaldual.ops import UnsupportedError, ZeroNormalizerError, plan
from primaldual.primal import (
    EluPlusOne,
    Forget,
    Gated,
    Gaussian,
    KernelSum,
    Normalizer,
    Polynomial,
    Pooled,
    Recenter,
    Spec,
    Unit,
)
from primaldual.regression import certify, diagnose, fit
from support.watch import Watch

H, N, D = 4, 11, 4


def tensors(*sizes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, H, N, d, generator=generator, dtype=dtype) for d in sizes or (D, D, D))


def close(found: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


LOG_FORGET = -torch.rand(2, H, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("impl", ["auto", "dense", "reference"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_a_sink_is_one_more_key_and_value_of_zeros(impl: str, causal: bool) -> None:
    q, k, v = tensors()
    s = torch.linspace(-2, 3, H, dtype=torch.float64)
    scores = q @ k.mT / D**0.5
    scores = scores.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf) if causal else scores
    kernel = scores.exp()
    expected = kernel @ v / (kernel.sum(-1, keepdim=True) + s.exp()[:, None, None])
    learned = Primal(normalizer=KernelSum("learned"))
    close(attention(q, k, v, learned, parameters={"sink": s}, impl=impl, is_causal=causal), expected)
    one = attention(q, k, v, Primal(normalizer=KernelSum(1)), impl=impl, is_causal=causal)
    close(one, kernel @ v / (kernel.sum(-1, keepdim=True) + 1))
    close(one, attention(q, k, v, learned, is_causal=causal, impl=impl))  # which starts there


def test_a_sink_keeps_large_scores_in_range_and_takes_all_weight_of_small_ones() -> None:
    q, _k, v = (x.float() for x in tensors())
    for impl in ("auto", "dense", "reference"):
        large = attention(q.abs(), 100 * q.abs(), v, Primal(normalizer=KernelSum(1)), impl=impl)
        close(large, attention(q.abs(), 100 * q.abs(), v, "softmax"), 1e-4)
        apart = attention(q.abs(), -1e4 * q.abs(), v, Primal(normalizer=KernelSum(1)), impl=impl)
        assert (apart == 0).all()


@pytest.mark.parametrize("over", [KernelSum(), KernelSum("learned"), Unit()], ids=repr)
def test_a_gate_multiplies_the_output(over: Normalizer) -> None:
    q, k, v = tensors()
    alone = attention(q, k, v, Primal(normalizer=over))
    of_heads, of_channels = torch.rand(2, H, N).double(), torch.rand(2, H, N, D).double()
    found, weights = attention(
        q, k, v, Primal(normalizer=Gated(over)), parameters={"gate": of_heads}, need_weights=True
    )
    close(found, of_heads.unsqueeze(-1) * alone)
    close(weights @ v, found)
    primal = Primal(normalizer=Gated(over, "channel"))
    found, weights = attention(q, k, v, primal, parameters={"gate": of_channels}, need_weights=True)
    close(found, of_channels * alone)
    close(of_channels * (weights @ v), found)


@pytest.mark.parametrize("per", ["head", "channel"])
def test_a_gated_layer_starts_as_half_of_the_one_without_and_learns_its_gates(per: str) -> None:
    x = torch.randn(2, N, 16)
    layers = []
    for normalizer in (KernelSum(), Gated(per=per)):
        torch.manual_seed(0)
        layers.append(MultiheadAttention(16, H, bias=False, batch_first=True, mechanism=Primal(normalizer=normalizer)))
    plain, gated = layers
    close(gated(x, x, x)[0], plain(x, x, x)[0] / 2, 1e-6)
    gated(x, x, x)[0].square().sum().backward()
    assert all((p.grad != 0).any() for p in gated.made.parameters())
    before = gated(x, x, x)[0]
    torch.nn.init.normal_(gated.made["gate"].weight)
    assert (gated(x, x, x)[0] - before).abs().max() > 1e-2


def test_the_gate_of_a_query_is_made_of_the_query() -> None:
    layer = MultiheadAttention(16, H, batch_first=True, mechanism="gate", kdim=6, vdim=6)
    torch.nn.init.normal_(layer.made["gate"].weight)
    x, key = torch.randn(1, 3, 16), torch.randn(1, 7, 6)
    whole = layer(x, key, key)[0]
    close(torch.cat([layer(x[:, i : i + 1], key, key)[0] for i in range(3)], 1), whole, 1e-6)


@pytest.mark.parametrize("impl", ["auto", "dense", "reference"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_gaussian_kernel_is_a_bias_on_the_keys_of_softmax(impl: str, scale: float | None) -> None:
    q, k, v = tensors()
    factor = D**-0.5 if scale is None else scale
    for b in (1.0, 0.7):
        distance = (q.unsqueeze(3) - k.unsqueeze(2)).square().sum(-1)
        kernel = (-distance * factor / (2 * b * b)).exp()
        found = attention(q, k, v, Primal(Gaussian(b)), impl=impl, scale=scale)
        close(found, kernel @ v / kernel.sum(-1, keepdim=True))
        bias = (-k.square().sum(-1) * factor / (2 * b * b)).unsqueeze(2).expand(-1, -1, N, -1)
        close(found, attention(q / b**2, k, v, "softmax", attn_mask=bias, scale=scale))


def test_recentring_does_nothing_to_a_gaussian_kernel() -> None:
    q, k, v = tensors()
    close(attention(q, k, v, Primal(Gaussian(), inputs=(Recenter(0.7),))), attention(q, k, v, Primal(Gaussian())))


@pytest.mark.parametrize(("degree", "constant"), [(1, 2.0), (2, 1.0), (3, 0.5), (4, 0.0)])
def test_the_features_of_a_polynomial_have_its_kernel(degree: int, constant: float) -> None:
    x, y = torch.randn(5, D).double(), torch.randn(7, D).double()
    features = Polynomial(degree, constant)
    assert features.features(x).shape == (5, features.dim(D))
    close(features.features(x) @ features.features(y).mT, (x @ y.mT / D**0.5 + constant) ** degree, 1e-10)


def test_an_even_polynomial_is_positive_and_an_odd_one_may_have_no_normalizer() -> None:
    q, k, _v = tensors()
    assert (Polynomial(2, 0.1).kernel(q, k) >= 0).all() and (Polynomial(3, 0.1).kernel(q, k) < 0).any()
    one = torch.ones(1, 1, 1, 1)
    with pytest.raises(ZeroNormalizerError):
        attention(one, -one, one, Primal(Polynomial(3, 1.0)), impl="reference")
    with pytest.raises(ValueError, match=r"constant must be a finite number of at least 0.*indefinite"):
        Polynomial(2, -1.0)


def test_a_polynomial_of_too_many_features_is_computed_by_its_kernel() -> None:
    q = torch.randn(1, 2, 9, 64)
    chosen = plan(q, q, q, Primal(Polynomial(4)))
    assert chosen.impl == "dense"
    assert "814,385 features, over the limit" in dict(chosen.candidates)["linear"]
    assert "as written" in derive(Primal(Polynomial(4))).explain(head_dim=64)
    assert plan(q, q, q, "polynomial").impl == "dense"  # 2,145 features for 9 keys
    long = torch.empty(1, 2, 4096, 64)
    assert plan(long, long, long, "polynomial").impl == "linear"


def decayed(q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor) -> Tensor:
    """The Forgetting Transformer, key by key."""
    out = torch.zeros_like(v)
    for i in range(q.shape[2]):
        kernel = [
            (q[:, :, i] * k[:, :, j]).sum(-1) / D**0.5 + log_forget[:, :, j + 1 : i + 1].sum(-1) for j in range(i + 1)
        ]
        out[:, :, i] = (torch.stack(kernel, -1).softmax(-1).unsqueeze(-1) * v[:, :, : i + 1]).sum(2)
    return out


@pytest.mark.parametrize("impl", ["auto", "dense", "reference"])
def test_forgetting_is_a_weight_for_each_key(impl: str) -> None:
    q, k, v = tensors()
    given = {"parameters": {"log_forget": LOG_FORGET}, "impl": impl}
    whole = attention(q, k, v, "forget", is_causal=True, **given)
    close(whole, decayed(q, k, v, LOG_FORGET))
    close(attention(q[:, :, -1:], k, v, "forget", is_causal=True, query_offset=N - 1, **given), whole[:, :, -1:])


def test_heads_start_with_the_slopes_of_alibi() -> None:
    q, k, v = tensors()
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)], dtype=torch.float64)
    distance = torch.arange(N)[:, None] - torch.arange(N)
    scores = (q @ k.mT / D**0.5 - slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    close(attention(q, k, v, "forget", is_causal=True), scores.softmax(-1) @ v, 1e-6)  # the start is in float32
    torch.manual_seed(0)
    layer = MultiheadAttention(16, H, batch_first=True, mechanism="forget").double()
    x = torch.randn(2, N, 16).double()
    made = layer.made["log_forget"](x)
    close(made, -slopes[:, None].expand(2, H, N), 1e-6)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("how", ["mean", "max", "conv", "kmeans"])
def test_a_pooled_point_weighs_as_much_as_its_tokens(how: str, causal: bool) -> None:
    if causal and how != "mean":
        pytest.skip("it has no causal form")
    q, k, v = tensors()
    hidden = torch.zeros(2, N, dtype=torch.bool)
    hidden[1, 5:9] = True
    primal = Primal(weights=Forget(), training_set=Pooled((3, 3, 3, 3), how))
    given = {"parameters": {"log_forget": LOG_FORGET}, "key_padding_mask": hidden}
    found = attention(q, k, v, primal, is_causal=causal, **given)
    if how == "kmeans":
        return close(found, attention(q, k, v, primal, impl="reference", **given))
    c = LOG_FORGET.masked_fill(hidden[:, None], 0.0).cumsum(-1)
    for i in (0, 4, 7, N - 1):
        end = i + 1 if causal else N
        points, scores = [], []
        for start in range(0, end, 3):
            for b in range(2):
                tokens = [t for t in range(start, min(start + 3, end)) if not hidden[b, t]]
                if not tokens:
                    continue
                key, value = k[b][:, tokens], v[b][:, tokens]
                pooled = (key.amax(1), value.amax(1)) if how == "max" else (key.mean(1), value.mean(1))
                weight = (-c[b][:, tokens]).logsumexp(-1)
                scores.append((b, (q[b, :, i] * pooled[0]).sum(-1) / D**0.5 + weight))
                points.append((b, pooled[1]))
        for b in range(2):
            weights = torch.stack([s for at, s in scores if at == b], -1).softmax(-1)
            expected = (weights.unsqueeze(-1) * torch.stack([p for at, p in points if at == b], 1)).sum(1)
            close(found[b, :, i], expected, 1e-6 if how == "conv" else 1e-12)  # whose start is in float32
    return None


@pytest.mark.parametrize("features", [None, EluPlusOne()], ids=["softmax", "linear"])
def test_what_is_forgotten_entirely_leaves_the_range_of_no_dtype(features: EluPlusOne | None) -> None:
    primal = Primal(weights=Forget()) if features is None else Primal(features, weights=Forget())
    q, k, v = tensors(dtype=torch.float32)
    forgotten = {"log_forget": torch.full((2, H, N), -1e3)}
    for impl in ("auto", "dense", "reference"):
        close(attention(q, k, v, primal, is_causal=True, parameters=forgotten, impl=impl), v, 1e-6)
        last = attention(q, k, v, primal, parameters=forgotten, impl=impl)
        close(last, v[:, :, -1:].expand_as(last), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["halves", "autocast"])
def test_a_decay_over_many_tokens_is_not_rounded_to_16_bits(dtype: torch.dtype, autocast: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 700, 8, generator=generator).to(dtype) for _ in range(3))
    log_forget = -2 * torch.rand(1, 2, 700, generator=generator)  # which adds up to 700
    truth = attention(
        *(x.double() for x in (q, k, v)), "forget", is_causal=True, parameters={"log_forget": log_forget.double()}
    )
    q, k, v = (x.float() if autocast else x for x in (q, k, v))
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        found = attention(q, k, v, "forget", is_causal=True, parameters={"log_forget": log_forget}, impl="sdpa")
    assert found.dtype == dtype
    assert (found.double() - truth).abs().max() < 6 * torch.finfo(dtype).eps * truth.abs().max()


def test_padding_forgets_nothing_and_nothing_to_come_is_seen() -> None:
    q, k, v = tensors()
    hidden = torch.arange(N).expand(2, -1) % 3 == 1
    left = ~hidden[0]
    whole = attention(q, k, v, "forget", key_padding_mask=hidden, is_causal=True, parameters={"log_forget": LOG_FORGET})
    kept = [x[:, :, left] for x in (q, k, v, LOG_FORGET)]
    close(whole[:, :, left], attention(*kept[:3], "forget", is_causal=True, parameters={"log_forget": kept[3]}))
    later = LOG_FORGET.clone()
    later[:, :, 6:] = torch.nan
    for impl in ("auto", "dense", "reference"):
        found = attention(q, k, v, "forget", is_causal=True, parameters={"log_forget": later}, impl=impl)
        close(found[:, :, :6], decayed(*(x[:, :, :6] for x in (q, k, v, LOG_FORGET))))


def test_weights_need_the_kernel_sum_in_which_a_factor_of_the_query_cancels() -> None:
    for normalizer in (Unit(), KernelSum(1), Gated(Unit())):
        with pytest.raises(ValueError, match=r"cancels under KernelSum\(\) alone"):
            Primal(normalizer=normalizer, weights=Forget())


@pytest.mark.parametrize("name", ["forget", "gaussian", "sink"])
def test_causal_heads_with_a_bias_or_a_sink_hold_no_matrix_of_scores(name: str) -> None:
    length = 256
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    with Watch() as watch:
        attention(q, k, v, name, is_causal=True).sum().backward()
    assert watch.largest < 2 * length * length / 4


def test_what_is_made_of_the_input_is_checked() -> None:
    q, k, v = tensors()
    with pytest.raises(
        ValueError, match=r"'gate'.*every query.*shape \[2, 4, 11, 4\].*got torch.float64, \[2, 4, 11\]"
    ):
        attention(q, k, v, "gate", parameters={"gate": torch.rand(2, H, N).double()})
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got 1"):
        attention(q, k, v, "forget", parameters={"log_forget": 1})
    with pytest.raises(ValueError, match="this primal has no 'gate'"):
        attention(q, k, v, "softmax", parameters={"gate": torch.rand(2, H, N).double()})
    for wrong in (-1, float("inf"), "loud", True):
        with pytest.raises(ValueError, match="sink must be a finite number of at least 0, or 'learned'"):
            KernelSum(wrong)
    with pytest.raises(ValueError, match="over must be a Normalizer without a gate"):
        Gated(Gated())
    with pytest.raises(ValueError, match="bandwidth must be a positive finite number"):
        Gaussian(0.0)


def test_a_field_that_a_part_was_given_since_is_written_down_where_it_is_used() -> None:
    assert KernelSum().to_dict() == {"kind": "KernelSum"} and "weights" not in Primal().to_dict()
    used = Primal(normalizer=KernelSum(1), weights=None)
    assert used.to_dict()["normalizer"] == {"kind": "KernelSum", "sink": 1}
    assert Spec.from_dict(Primal(weights=Forget()).to_dict()) == Primal(weights=Forget())


def test_executors_without_such_a_form_refuse_with_the_reason() -> None:
    q, k, v = (x.float() for x in tensors())
    for name, impl, reason in (
        ("forget", "recentred", "softmax heads"),
        ("gaussian", "recentred", "softmax heads"),
        ("sink", "mixed", "softmax heads"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            attention(q, k, v, name, impl=impl)
    with pytest.raises(UnsupportedError, match="relative to the largest"):
        attention(q, k, v, Primal(EluPlusOne(), weights=Forget()), is_causal=True, impl="linear")


MADE = [
    Primal(normalizer=Gated(KernelSum("learned"), "channel")),
    Primal(EluPlusOne(), Gated(), training_set=Pooled((1, 2, 1, 3))),
    Primal(weights=Forget(), training_set=Pooled((1, 2, 1, 3))),
    Primal(Gaussian(0.7), normalizer=KernelSum("learned")),
    Primal(Polynomial(3, 2.0)),
]


@pytest.mark.parametrize("primal", MADE, ids=repr)
def test_the_regression_is_certified_to_ten_digits(primal: Primal) -> None:
    found = certify(primal)
    assert found.ok, found.failed
    assert all(
        check.value <= 1e-10 for check in found.checks[:5]
    )  # the gap, and the conditions of Karush, Kuhn, Tucker


def test_a_gated_fit_is_predicted_by_the_gate_of_the_point() -> None:
    keys, targets = (torch.randn(2, H, N, 3, dtype=torch.float64) for _ in range(2))
    gate = torch.rand(2, H, N).double()
    solved = fit(Primal(normalizer=Gated()), keys, targets, C=10.0, epsilon=0.1, parameters={"gate": gate})
    close(2 * solved.predict(keys, gate=gate / 2), solved.predict(keys, gate=gate))
    with pytest.raises(ValueError, match="per='head'"):
        fit("gate", keys, targets, C=10.0, epsilon=0.1)


def test_a_point_of_twice_the_weight_is_a_point_that_is_there_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, targets = (torch.randn(2, H, N, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    log_forget = torch.zeros(2, H, N, dtype=torch.float64)
    log_forget[..., 0], log_forget[..., 1] = -math.log(2), math.log(2)  # w = 2, 1, 1, …
    # the heaviest weighs 1: h is half of what it is for two points, |W|² a quarter, and the price of both with it
    weighted = fit("forget", keys, targets, C=2 * 10.0 / 4, epsilon=0.1, parameters={"log_forget": log_forget})
    twice = (torch.cat([x[:, :, :1], x], 2) for x in (keys, targets))
    plain = fit("softmax", *twice, C=10.0, epsilon=0.1)
    assert (weighted.alpha + weighted.alpha_tilde >= 0.999 * weighted.prices.unsqueeze(-1)).any()
    close(weighted.predict(keys), plain.predict(keys), 1e-7)


def test_heads_with_gates_and_decays_are_diagnosed_where_they_are_one_regression() -> None:
    x = torch.randn(2, N, 16)
    notes = {}
    for primal in (Primal(normalizer=Gated()), Primal(normalizer=Gated(per="channel")), Primal(weights=Forget())):
        layer = MultiheadAttention(16, H, batch_first=True, mechanism=primal)
        rows = diagnose(layer, (x, x, x)).rows
        notes[primal] = {row.note for row in rows}, all(row.log_C == row.log_C for row in rows)
    per_head, per_channel, weighted = notes.values()
    assert per_head == weighted == ({""}, True)
    assert not per_channel[1] and "each output is a regression of its own" in per_channel[0].pop()


@pytest.mark.parametrize("form", ["text", "latex", "markdown"])
def test_the_derivation_says_what_is_the_paper_s_f_and_what_extends_it(form: str) -> None:
    primals = {
        "this is exactly its f": Primal(normalizer=Gated()),
        "each output is a regression with a normalizer of its own": Primal(normalizer=Gated(per="channel")),
        "takes weight and has no value. f is exactly the paper's": Primal(normalizer=Gated(KernelSum(1))),
        "Points have weights, which extends the paper's": Primal(weights=Forget()),
        "The degree is odd": Primal(Polynomial(3)),
    }
    for sentence, primal in primals.items():
        assert sentence in derive(primal).explain(form)
        assert sentence not in derive("softmax").explain(form)
