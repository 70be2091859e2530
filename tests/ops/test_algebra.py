"""The algebra of the mechanisms, as properties of `attention`."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from primaldual import Primal, attention, mechanism, mechanisms
from primaldual.primal import BatchNorm, Exponential, Pooled, RandomFeatures, Recenter, Sparse, Strided, Taylor

seeds = st.integers(0, 10_000)
lengths = st.integers(1, 24)


def draw(seed: int, length: int, heads: int = 4, dim: int = 4, keys: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (length, keys or length, keys or length)
    return [torch.randn(2, heads, n, dim, generator=generator, dtype=torch.float64) for n in sizes]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return bool(((a - b).abs() <= tolerance * b.abs().max().clamp(min=1)).all())


@given(seeds, lengths)
def test_shifting_queries_and_keys_by_one_vector_leaves_bn_unchanged(seed: int, length: int) -> None:
    q, k, v = draw(seed, length)
    shift = 3 * torch.randn(4, dtype=torch.float64)
    for primal in (mechanism("bn"), mechanism("bn+sh"), mechanism("linear-bn"), mechanism("bn", full=True)):
        assert close(attention(q + shift, k + shift, v, primal), attention(q, k, v, primal), 1e-8)
    assert length == 1 or not close(attention(q + shift, k + shift, v, "softmax"), attention(q, k, v, "softmax"), 1e-8)


@given(seeds, st.integers(3, 24), st.integers(0, 3), st.floats(0.1, 10), st.booleans())
def test_scaling_a_feature_leaves_full_batch_norm_unchanged(
    seed: int, length: int, d: int, c: float, flip: bool
) -> None:
    q, k, v = draw(seed, length)
    factor = torch.ones(4, dtype=torch.float64)
    factor[d] = c
    for features, sign in ((Exponential(), -1.0 if flip else 1.0), (mechanism("linear").features, 1.0)):
        primal = Primal(features=features, inputs=(BatchNorm(eps=1e-14),))
        scaled = attention(q * factor * sign, k * factor * sign, v, primal)
        assert close(scaled, attention(q, k, v, primal), 1e-7)


@given(seeds, lengths)
def test_scaled_heads_with_scales_of_one_are_softmax(seed: int, length: int) -> None:
    q, k, v = draw(seed, length)
    assert close(attention(q, k, v, mechanism("sh", scales=(1, 1, 1, 1))), attention(q, k, v, "softmax"))


@given(seeds, st.integers(1, 6), st.sampled_from([2, 3, 4]))
def test_on_keys_and_values_constant_on_full_windows_scaled_heads_are_softmax(
    seed: int, windows: int, scale: int
) -> None:
    q, k, v = draw(seed, windows * scale, keys=windows)
    k, v = (x.repeat_interleave(scale, 2) for x in (k, v))
    assert close(attention(q, k, v, mechanism("sh", scales=(scale,) * 4)), attention(q, k, v, "softmax"))


@given(seeds, st.integers(2, 6), st.integers(1, 3))
def test_on_uneven_windows_scaled_heads_weigh_a_window_by_one_over_its_size(seed: int, windows: int, last: int) -> None:
    scale = 4
    q, k, v = draw(seed, 9, keys=windows)
    sizes = torch.tensor([scale] * (windows - 1) + [last])
    weight = (1 / sizes.double()).log().repeat_interleave(sizes)  # log 1/|w| on every key of window w
    k, v = (x.repeat_interleave(sizes, 2) for x in (k, v))
    weighted = attention(q, k, v, "softmax", attn_mask=weight.expand(9, -1))
    assert close(attention(q, k, v, mechanism("sh", scales=(scale,) * 4)), weighted)


@given(seeds, st.integers(1, 16), st.integers(1, 9))
def test_padding_appended_changes_nothing_that_is_kept(seed: int, length: int, extra: int) -> None:
    q, k, v = draw(seed, length)
    junk = [torch.cat([x, 1e3 * torch.randn(2, 4, extra, 4, dtype=torch.float64)], 2) for x in (q, k, v)]
    hidden = (torch.arange(length + extra) >= length).expand(2, -1)
    for name in mechanisms():
        if name == "conv2d":
            continue  # a longer sequence is another grid
        options = {"pattern": Strided(3)} if "sparse" in name else {}
        primal = mechanism(name, **options)
        padded = attention(*junk, primal, key_padding_mask=hidden, query_padding_mask=hidden)
        assert close(padded[:, :, :length], attention(q, k, v, primal)), name


@given(seeds, st.integers(2, 20), st.data())
def test_changing_a_future_token_never_changes_a_causal_output(seed: int, length: int, data) -> None:
    q, k, v = draw(seed, length)
    i = data.draw(st.integers(0, length - 2))
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, i + 1 :] = 1e2 * torch.randn_like(x[:, :, i + 1 :])
    primals = [mechanism(n) for n in mechanisms()]
    primals += [mechanism("conv1d", causal=True), mechanism("bn+sh", full=True), mechanism("sh", prefix=2)]
    checked = 0
    for primal in primals:
        if primal.causal_refusal(4):
            continue
        for impl in ("auto", "reference"):
            before = attention(q, k, v, primal, is_causal=True, impl=impl)
            after = attention(*changed, primal, is_causal=True, impl=impl)
            assert close(after[:, :, : i + 1], before[:, :, : i + 1]), (primal, impl)
        checked += 1
    assert checked >= 10


@given(seeds, st.integers(2, 20), st.data())
def test_a_hidden_key_leaks_into_no_row_that_may_not_see_it(seed: int, length: int, data) -> None:
    q, k, v = draw(seed, length)
    j = data.draw(st.integers(0, length - 1))
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[::2, j] = True
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, :, j], changed_v[:, :, j] = 50.0, -70.0
    for primal in (mechanism("bn"), mechanism("bn", full=True), mechanism("linear-bn"), mechanism("sparse-bn")):
        before = attention(q, k, v, primal, attn_mask=mask)
        after = attention(q, changed_k, changed_v, primal, attn_mask=mask)
        assert close(after[:, :, ::2], before[:, :, ::2], 1e-8)


@given(seeds, st.integers(0, 6))
def test_the_taylor_kernel_meets_its_error_bound(seed: int, degree: int) -> None:
    x, y, _ = draw(seed, 5)
    z = Exponential().log_kernel(x, y)
    bound = z.abs() ** (degree + 1) * z.abs().exp() / math.factorial(degree + 1)
    assert ((Taylor(degree).kernel(x, y) - z.exp()).abs() <= bound + 1e-12).all()


@given(seeds)
def test_taylor_attention_converges_to_softmax(seed: int) -> None:
    q, k, v = (x / 2 for x in draw(seed, 7))
    exact = attention(q, k, v, "softmax")
    errors = [(attention(q, k, v, Primal(features=Taylor(t))) - exact).abs().max() for t in (2, 4, 8)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4


def test_random_features_attention_approaches_softmax_with_more_features() -> None:
    q, k, v = (x / 2 for x in draw(0, 12))
    exact = attention(q, k, v, "softmax")

    def error(count: int) -> float:
        runs = [attention(q, k, v, Primal(features=RandomFeatures(count, seed))) - exact for seed in range(20)]
        return float(torch.stack(runs).square().mean().sqrt())

    assert error(256) < error(16) / 2  # the standard error falls with 1/√count: a factor 4


@given(seeds, lengths)
def test_eqn_bn_attn_expanding_holds_as_written(seed: int, length: int) -> None:
    """softmax_j(Σ_d (q_i(d)k_j(d) − (1/N)Σ_j' k_j'(d)k_j(d)) / (√D(σ_d² + ε))) v_j."""
    q, k, v = draw(seed, length)
    eps = 1e-3
    variance = k.var(2, correction=0, keepdim=True)
    between_keys = torch.einsum("bhmd,bhjd->bhjd", k, k) / length  # (1/N) Σ_j' k_j'(d) k_j(d)
    score = torch.einsum("bhid,bhjd->bhijd", q, k) - between_keys.unsqueeze(2)
    score = (score / (math.sqrt(4) * (variance.unsqueeze(3) + eps))).sum(-1)
    written = score.softmax(-1) @ v
    for impl in ("reference", "sdpa"):
        assert close(attention(q, k, v, Primal(inputs=(BatchNorm(eps=eps),)), impl=impl), written, 1e-9)


@given(seeds, lengths)
def test_recentering_keys_alone_changes_nothing(seed: int, length: int) -> None:
    q, k, v = draw(seed, length)
    assert close(attention(q, k - k.mean(2, keepdim=True), v, "softmax"), attention(q, k, v, "softmax"))


@given(seeds, lengths, st.floats(-2, 2))
def test_recentering_is_what_eqn_recenter_attn_says(seed: int, length: int, beta: float) -> None:
    q, k, v = draw(seed, length)
    shift = beta * k.mean(2, keepdim=True)
    written = torch.softmax((q - shift) @ (k - shift).transpose(-1, -2) / 2, -1) @ v
    assert close(attention(q, k, v, Primal(inputs=(Recenter(beta),))), written, 1e-9)


@given(seeds, st.integers(1, 20))
def test_a_pattern_that_keeps_everything_is_softmax(seed: int, length: int) -> None:
    q, k, v = draw(seed, length)
    for over in (None, Pooled((1, 1, 2, 2))):
        dense = Primal(training_set=over) if over else Primal()
        full = Primal(training_set=Sparse(Strided(1), over) if over else Sparse(Strided(1)))
        assert close(attention(q, k, v, full), attention(q, k, v, dense))
