"""What SEMANTICS leaves no freedom in: rows without keys, ragged windows, weights, dropout, statistics."""

from contextlib import suppress
from itertools import product

import pytest
import torch
from torch import Tensor

from primaldual import Primal, attention, mechanism, mechanisms
from primaldual.ops import UnsupportedError, ZeroNormalizerError
from primaldual.primal import Gated, KernelSum, Pooled, Taylor, Unit, Window
from support.battery import CASES, HEADS, PRIMALS, Case, exists, inputs, parameters


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", PRIMALS)
def test_a_row_without_keys_gives_zeros_and_zero_gradients(name: str, impl: str) -> None:
    qkv, masks = inputs(Case(16, 16, "padding"))
    out = attention(*qkv, PRIMALS[name], impl=impl, **masks)
    gradients = torch.autograd.grad(out.square().sum() + out.sum(), qkv)
    assert (out[0] == 0).all() and not (out[1] == 0).all()
    for g in gradients:
        assert (g[0] == 0).all() and g.isfinite().all()


@pytest.mark.parametrize("name", PRIMALS)
def test_hidden_content_never_matters_even_when_it_is_not_a_number(name: str) -> None:
    qkv, masks = inputs(Case(16, 16, "padding"))
    hidden = masks["key_padding_mask"][:, None, :, None]
    poisoned = [qkv[0], *(x.detach().masked_fill(hidden, torch.nan) for x in qkv[1:])]
    for impl in ("auto", "reference"):
        out = attention(*poisoned, PRIMALS[name], impl=impl, **masks)
        assert torch.equal(out, attention(*qkv, PRIMALS[name], impl=impl, **masks))


@pytest.mark.parametrize("name", [n for n in PRIMALS if n not in ("sh-max", "sh-conv")])
def test_weights_sum_to_one_and_give_the_output(name: str) -> None:
    primal = PRIMALS[name]
    for case in CASES:
        if not exists(primal, case):
            continue
        qkv, masks = inputs(case)
        out, weights = attention(*qkv, primal, need_weights=True, **masks)
        assert weights.shape == (2, HEADS, case.queries, case.keys)
        by_channel = isinstance(primal.normalizer, Gated) and primal.normalizer.per == "channel"
        gate = 0.5 if by_channel else 1.0  # what channels have in common is without their gates, 1/2 at the start
        torch.testing.assert_close(gate * weights @ qkv[2], out, rtol=0, atol=1e-10)
        if primal.normalizer == KernelSum():
            total = weights.sum(-1)
            sees = ~(out == 0).all(-1)
            torch.testing.assert_close(total[sees], torch.ones_like(total[sees]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ["max", "conv"])
def test_max_and_conv_pooling_refuse_weights(how: str) -> None:
    q = torch.randn(1, 8, 5, 4)
    with pytest.raises(UnsupportedError, match=f"{how} pooling has no weights"):
        attention(q, q, q, mechanism("sh", how=how), need_weights=True)


@pytest.mark.parametrize("name", ["softmax", "bn+sh", "sparse-bn"])
def test_dropout_falls_on_the_weights(name: str) -> None:
    q, k, v = (torch.randn(1, 8, 30, 4, dtype=torch.float64) for _ in range(3))
    for impl in ("auto", "reference"):
        runs = torch.stack([attention(q, k, v, name, dropout_p=0.5, impl=impl) for _ in range(400)])
        error = runs.std(0) / 20  # the standard error of the mean of 400 runs
        assert ((runs.mean(0) - attention(q, k, v, name)).abs() < 6 * error + 1e-9).all()
        gone = runs == 0  # an output is zero only where every weight of its row fell
        assert torch.equal(gone.any(-1), gone.all(-1))


def test_dropout_of_finite_features_falls_on_the_output() -> None:
    q, k, v = (torch.randn(1, 8, 30, 4, dtype=torch.float64) for _ in range(3))
    whole = attention(q, k, v, "linear")
    for impl in ("linear", "reference"):
        out = attention(q, k, v, "linear", dropout_p=0.25, impl=impl)
        kept = out != 0
        torch.testing.assert_close(out[kept], whole[kept] / 0.75)
        assert 0.15 < 1 - kept.double().mean() < 0.35


def test_dropout_is_reproducible_from_the_seed() -> None:
    q = torch.randn(1, 8, 12, 4)
    for name in ("softmax", "linear", "sparse", "sh"):
        runs = []
        for _ in range(2):
            torch.manual_seed(7)
            runs.append(attention(q, q, q, name, dropout_p=0.3))
        assert torch.equal(*runs), name


def test_causal_statistics_take_one_vote_per_complete_window_and_one_for_the_running_one() -> None:
    q, k, v = (torch.randn(1, 1, 7, 2, dtype=torch.float64) for _ in range(3))
    out = attention(q, k, v, mechanism("bn+sh", scales=(3,)), is_causal=True)
    i = 4  # window 0 (tokens 0..2) is complete; of window 1 tokens 3 and 4 are seen
    points = torch.stack([k[0, 0, :3].mean(0), k[0, 0, 3:5].mean(0)])
    values = torch.stack([v[0, 0, :3].mean(0), v[0, 0, 3:5].mean(0)])
    mu = points.mean(0)
    weights = ((points - mu) @ (q[0, 0, i] - mu) / 2**0.5).softmax(0)
    torch.testing.assert_close(out[0, 0, i], weights @ values)


def test_sparse_statistics_are_over_all_keys_not_the_subset() -> None:
    q, k, v = (torch.randn(1, 1, 9, 2, dtype=torch.float64) for _ in range(3))
    primal = mechanism("sparse-bn", pattern=Window(3))
    mu = k.mean(2, keepdim=True)
    keep = (torch.arange(9)[:, None] - torch.arange(9)).abs() <= 3
    scores = ((q - mu) @ (k - mu).transpose(-1, -2) / 2**0.5).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(attention(q, k, v, primal), scores.softmax(-1) @ v)


def test_a_bias_on_keys_is_pooled_like_a_value() -> None:
    q, k, v = (torch.randn(1, 1, 6, 2, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(1, 6, dtype=torch.float64)
    pooled_k, pooled_v, pooled_bias = (x.unflatten(-2, (3, 2)).mean(-2) for x in (k, v, bias[None, ..., None]))
    scores = q @ pooled_k.transpose(-1, -2) / 2**0.5 + pooled_bias.transpose(-1, -2)
    out = attention(q, k, v, mechanism("sh", scales=(2,)), key_padding_mask=bias)
    torch.testing.assert_close(out, scores.softmax(-1) @ pooled_v)


def test_a_causal_mask_beside_is_causal_is_a_hint() -> None:
    q, k, v = (torch.randn(1, 8, 9, 4) for _ in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for name in ("softmax", "bn", "sh", "linear"):
        alone = attention(q, k, v, name, is_causal=True)
        assert torch.equal(attention(q, k, v, name, is_causal=True, attn_mask=mask), alone)


def test_the_causal_mask_as_attn_mask_is_the_causal_form_for_unpooled_heads() -> None:
    q, k, v = (torch.randn(1, 4, 9, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for name in ("softmax", "bn", "linear", "qk-norm", "sparse-bn"):
        masked = attention(q, k, v, PRIMALS[name], attn_mask=mask)
        torch.testing.assert_close(attention(q, k, v, PRIMALS[name], is_causal=True), masked, rtol=0, atol=1e-10)


def test_a_zero_normaliser_is_an_error_in_the_reference() -> None:
    q, k = torch.tensor([[[[2.0]]]]), torch.tensor([[[[-0.5]]]])  # 1 + q·k = 0
    with pytest.raises(ZeroNormalizerError, match="exactly zero for 1 of 1"):
        attention(q, k, k, Primal(features=Taylor(1)), impl="reference")


def test_large_scores_do_not_overflow() -> None:
    q = 100 * torch.randn(1, 8, 9, 16)
    for name in ("softmax", "bn", "sh", "sparse"):
        for impl in ("auto", "reference"):
            assert attention(q, q, q, name, impl=impl).isfinite().all()


def test_learned_parameters_default_to_their_start() -> None:
    q, k, v = (torch.randn(2, HEADS, 9, 4, dtype=torch.float64) for _ in range(3))
    for name in ("conv1d", "conv2d", "qk-norm", "bn-learned", "sh-conv"):
        primal = PRIMALS[name]
        start = {n: x.double() for n, x in primal.learned(HEADS, 4).items()}
        assert start
        torch.testing.assert_close(attention(q, k, v, primal), attention(q, k, v, primal, parameters=start))
        moved = attention(q, k, v, primal, parameters=parameters(primal, Case(9, 9)))
        assert not torch.allclose(attention(q, k, v, primal), moved)


def test_pooling_over_a_grid_with_a_prefix() -> None:
    q, k, v = (torch.randn(2, 2, 13, 4, dtype=torch.float64) for _ in range(3))
    primal = Primal(training_set=Pooled((1, 2), prefix=1, grid=(3, 4)))

    def by_hand(x: Tensor) -> Tensor:
        patches = x[:, 1, 1:].unflatten(1, (3, 4))
        windows = [patches[:, a : a + 2, b : b + 2].flatten(1, 2).mean(1) for a in (0, 2) for b in (0, 2)]
        return torch.stack([x[:, 1, 0], *windows], dim=1)

    keys, values = by_hand(k), by_hand(v)
    expected = (q[:, 1] @ keys.transpose(-1, -2) / 2).softmax(-1) @ values
    for impl in ("sdpa", "reference"):
        torch.testing.assert_close(attention(q, k, v, primal, impl=impl)[:, 1], expected)


@pytest.mark.parametrize("name", [n for n in PRIMALS if n != "conv2d"])
def test_no_keys_at_all_give_zeros(name: str) -> None:
    q, none = torch.randn(2, HEADS, 5, 4), torch.randn(2, HEADS, 0, 4)
    for impl in ("auto", "reference"):
        assert torch.equal(attention(q, none, none, PRIMALS[name], impl=impl), torch.zeros(2, HEADS, 5, 4))
    if name not in ("sh-max", "sh-conv"):
        assert attention(q, none, none, PRIMALS[name], need_weights=True)[1].shape == (2, HEADS, 5, 0)


def test_an_unnormalised_exponential_overflows_to_inf() -> None:
    q = torch.full((1, 1, 2, 1), 40.0)
    hidden = torch.tensor([[False, True]])
    assert (attention(q, q, torch.ones_like(q), Primal(normalizer=Unit()), key_padding_mask=hidden) == torch.inf).all()


@pytest.mark.parametrize("name", ["softmax", "bn", "bn+sh", "linear-bn", "sparse-bn", "qk-norm"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_key_that_is_not_a_number_is_never_lost(name: str, causal: bool) -> None:
    if causal and mechanism(name).causal_refusal(8):
        return
    q, k, v = (torch.randn(1, 8, 16, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    k[0, :, 3, 2] = torch.nan
    expected = attention(q, k, v, name, impl="reference", is_causal=causal).isnan()
    found = attention(q, k, v, name, is_causal=causal).isnan()  # torch spreads it to rows whose mask hides that key
    assert expected.any() and (found | ~expected).all()


HIDING = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": torch.arange(64)[None] >= 6},
    "attn_mask": {"attn_mask": torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.9},
}


@pytest.mark.parametrize("masks", HIDING.values(), ids=HIDING)
@pytest.mark.parametrize("full", [False, True], ids=["bn", "full"])
def test_keys_far_from_zero_cost_no_accuracy_beside_the_reference(full: bool, masks: dict) -> None:
    q, k, v = (torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    primal = mechanism("bn", full=full)

    def output_and_keys_gradient(dtype: torch.dtype, impl: str) -> list[torch.Tensor]:
        x, y, z = ((t + far).to(dtype).clone().requires_grad_() for t, far in ((q, 1000), (k, 1000), (v, 0)))
        out = attention(x, y, z, primal, impl=impl, **masks)
        return [out.detach().double(), torch.autograd.grad(out.square().sum(), y)[0].double()]

    truth = output_and_keys_gradient(torch.float64, "reference")
    reference = output_and_keys_gradient(torch.float32, "reference")
    for impl in ("dense",) if full else ("dense", "sdpa"):  # torch's kernel rounds what 1/σ² of few keys magnifies
        found = output_and_keys_gradient(torch.float32, impl)
        for mine, beside, expected in zip(found, reference, truth, strict=True):
            assert (mine - expected).abs().max() < 2 * (beside - expected).abs().max(), impl


@pytest.mark.parametrize("shape", [(0, 16, 16), (1, 0, 0), (2, 0, 5), (2, 5, 0)], ids=str)
@pytest.mark.parametrize("name", [name for name in mechanisms() if name != "conv2d"])
def test_an_empty_batch_and_an_empty_sequence_give_outputs_of_their_shape(name: str, shape: tuple) -> None:
    batch, queries, keys = shape
    for impl, causal in product(("auto", "reference", "dense", "block_sparse", "sdpa"), (False, True)):
        q, k, v = (torch.randn(batch, 8, n, d, requires_grad=True) for n, d in ((queries, 4), (keys, 4), (keys, 3)))
        if causal and mechanism(name).causal_refusal(8):
            continue
        with suppress(UnsupportedError):
            for _ in range(2):  # what was planned before is another path
                out = attention(q, k, v, name, impl=impl, is_causal=causal)
            assert out.shape == (batch, 8, queries, 3) and not out.any()
            assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("scales", [(1, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("impl", ["sdpa", "dense"])
def test_a_query_that_sees_one_point_magnifies_no_rounding(impl: str, scales: tuple) -> None:
    """Its variance is 0, and its output the value of that point however it is mapped."""
    q, k, v = (torch.randn(1, 2, 4, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    primal = mechanism("bn+sh", full=True, scales=scales)
    q, k, v = (x[:, :, : scales[0]].clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, primal, impl=impl, is_causal=True)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    for gradient in torch.autograd.grad(out, (q, k), up):
        assert gradient.abs().max() < 1e-5
