"""T, the input maps."""

import math

import pytest
import torch
from torch.nn.functional import conv1d, conv2d, pad

from primaldual import Primal, attention, mechanism
from primaldual.ops import CausalFormError
from primaldual.ops.statistics import moments
from primaldual.primal import BatchNorm, DepthwiseConv1d, DepthwiseConv2d, EluPlusOne, Moments, Recenter, RmsNorm
from primaldual.primal.grids import grid_of

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def moments_of(keys: torch.Tensor) -> Moments:
    return Moments(keys.mean(2, keepdim=True), keys.var(2, keepdim=True, correction=0))


def tokens(length: int = 7, dim: int = 3) -> torch.Tensor:
    return torch.randn(2, 2, length, dim, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, -2.0])
def test_recentering_subtracts_beta_times_the_mean(beta):
    x, keys = tokens(4), tokens()
    expected = x - beta * keys.mean(2, keepdim=True)
    torch.testing.assert_close(Recenter(beta).apply(x, moments_of(keys), {}), expected, **TIGHT)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_batch_norm_recentres_and_divides_by_the_biased_standard_deviation(beta, eps):
    x, keys = tokens(4), tokens()
    deviation = keys - keys.mean(2, keepdim=True)
    expected = (x - beta * keys.mean(2, keepdim=True)) / (deviation.square().mean(2, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(BatchNorm(eps, beta).apply(x, moments_of(keys), {}), expected, **TIGHT)


def test_rms_norm_divides_each_token_by_its_own_size():
    x, gain = tokens(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = x / (x.square().sum(-1, keepdim=True) / 3 + 1e-6).sqrt()
    torch.testing.assert_close(RmsNorm().apply(x, Moments(None, None), {}), expected, **TIGHT)
    torch.testing.assert_close(RmsNorm().apply(x, Moments(None, None), {"gain": gain}), expected * gain, **TIGHT)


@pytest.mark.parametrize("map_", [Recenter(0.5, learnable=True), BatchNorm(beta=0.5, learnable=True)], ids=repr)
def test_a_learnable_beta_is_one_number_per_head_that_starts_at_beta(map_):
    assert torch.equal(map_.learned(3, 8)["beta"], torch.full((3,), 0.5))
    assert "beta" in map_.by_head
    x, keys = tokens(4), tokens()
    beta = torch.tensor([0.2, 3.0], dtype=torch.float64)
    learned = map_.apply(x, moments_of(keys), {"beta": beta})
    for head, value in enumerate(beta.tolist()):
        fixed = type(map_)(beta=value).apply(x, moments_of(keys), {})
        torch.testing.assert_close(learned[:, head], fixed[:, head], **TIGHT)


@pytest.mark.parametrize("map_", [Recenter(0.5), BatchNorm()], ids=repr)
def test_a_fixed_beta_learns_nothing(map_):
    assert map_.learned(3, 8) == {}


def test_rms_norm_learns_one_gain_for_all_heads_starting_at_one():
    assert torch.equal(RmsNorm().learned(3, 8)["gain"], torch.ones(8))
    assert RmsNorm().by_head == ()


@pytest.mark.parametrize("map_", [Recenter(0.3), BatchNorm(), RmsNorm()], ids=repr)
def test_maps_of_points_keep_the_dtype_and_compute_in_float32(map_):
    keys = tokens(dim=16)
    narrow = map_.apply(keys.bfloat16(), Moments(*(m.float() for m in moments_of(keys))), {})
    assert narrow.dtype == torch.bfloat16
    exact = map_.apply(keys.bfloat16().double(), moments_of(keys), {})
    # one rounding to bfloat16 at the end: half a unit in the last of 8 bits
    torch.testing.assert_close(narrow.double(), exact, rtol=2**-8, atol=1e-5)


def test_recentering_keys_alone_changes_nothing():
    q, k, v = tokens(), tokens(), tokens()
    softmax = attention(q, k, v, "softmax")
    torch.testing.assert_close(attention(q, k - k.mean(2, keepdim=True), v, "softmax"), softmax, **TIGHT)


def test_recentering_queries_and_keys_of_a_finite_map_is_not_recentering_queries_alone():
    q, k, v = tokens(), tokens(), tokens()
    mean = k.mean(2, keepdim=True)
    both = attention(q - mean, k - mean, v, Primal(EluPlusOne()))
    torch.testing.assert_close(attention(q, k, v, Primal(EluPlusOne(), inputs=(Recenter(),))), both, **TIGHT)
    assert (both - attention(q - mean, k, v, Primal(EluPlusOne()))).abs().max() > 1e-3


@pytest.mark.parametrize("beta", [math.nan, math.inf, -math.inf, "1", None, True], ids=repr)
@pytest.mark.parametrize("make", [Recenter, lambda beta: BatchNorm(beta=beta)], ids=["Recenter", "BatchNorm"])
def test_beta_is_a_finite_number(make, beta):
    with pytest.raises(ValueError, match="beta must be a finite number, got"):
        make(beta)


@pytest.mark.parametrize("eps", [-1e-5, math.nan, math.inf, "0"], ids=repr)
@pytest.mark.parametrize("make", [BatchNorm, RmsNorm], ids=lambda m: m.__name__)
def test_epsilon_is_finite_and_not_negative(make, eps):
    with pytest.raises(ValueError, match="eps must be a finite number of at least 0, got"):
        make(eps)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("causal", [False, True], ids=["centred", "causal"])
def test_a_1d_convolution_starts_as_the_identity(size, causal):
    map_, x = DepthwiseConv1d(size, causal), tokens()
    assert torch.equal(map_.tokens(x, {}), x)
    assert torch.equal(map_.tokens(x, map_.learned(2, 3)), x)
    assert map_.learned(2, 3)["conv_kernel"].shape == (size,)


def test_the_identity_is_the_middle_tap_or_the_last_one_when_causal():
    assert DepthwiseConv1d(5).learned(1, 1)["conv_kernel"].tolist() == [0, 0, 1, 0, 0]
    assert DepthwiseConv1d(4).learned(1, 1)["conv_kernel"].tolist() == [0, 1, 0, 0]
    assert DepthwiseConv1d(4, causal=True).learned(1, 1)["conv_kernel"].tolist() == [0, 0, 0, 1]
    assert DepthwiseConv2d((3, 2)).learned(1, 1)["conv_kernel"].tolist() == [[0, 0], [1, 0], [0, 0]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("causal", [False, True], ids=["centred", "causal"])
def test_a_1d_convolution_is_torchs_with_one_kernel_for_all_channels(size, causal):
    x, kernel = tokens(), torch.randn(size, dtype=torch.float64)
    left = size - 1 if causal else (size - 1) // 2  # an even size has the extra zero at the end
    channels = pad(x.flatten(0, 1).transpose(1, 2), (left, size - 1 - left))
    expected = conv1d(channels, kernel.expand(3, 1, -1), groups=3).transpose(1, 2).unflatten(0, (2, 2))
    torch.testing.assert_close(DepthwiseConv1d(size, causal).tokens(x, {"conv_kernel": kernel}), expected, **TIGHT)


@pytest.mark.parametrize("causal", [False, True], ids=["centred", "causal"])
def test_a_kernel_for_each_channel_is_torchs_depthwise_convolution(causal):
    map_, x = DepthwiseConv1d(4, causal, channels="each"), tokens()
    assert torch.equal(map_.tokens(x, {}), x) and torch.equal(map_.tokens(x, map_.learned(2, 3)), x)
    kernel = torch.randn(2, 3, 4, dtype=torch.float64)
    left = 3 if causal else 1
    for head in range(2):
        channels = pad(x[:, head].mT, (left, 3 - left))
        expected = conv1d(channels, kernel[head][:, None], groups=3).mT
        torch.testing.assert_close(map_.tokens(x, {"conv_kernel": kernel})[:, head], expected, **TIGHT)


def test_kernels_are_for_one_or_each():
    assert DepthwiseConv1d(channels="each").by_head == ("conv_kernel",) and not DepthwiseConv1d().by_head
    with pytest.raises(ValueError, match="DepthwiseConv1d: channels must be one of one, each; got 'all'"):
        DepthwiseConv1d(channels="all")


def test_a_causal_convolution_does_not_look_ahead():
    x, kernel = tokens(), torch.randn(4, dtype=torch.float64)
    later = x.clone()
    later[:, :, 4:] += 1.0
    map_ = DepthwiseConv1d(4, causal=True)
    before, after = (map_.tokens(t, {"conv_kernel": kernel}) for t in (x, later))
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert not torch.equal(before[:, :, 4:], after[:, :, 4:])


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 2), (2, 3), (5, 4)], ids=str)
@pytest.mark.parametrize("prefix", [0, 2])
def test_a_2d_convolution_is_torchs_over_the_grid_and_leaves_the_prefix_alone(size, prefix):
    x, kernel = tokens(prefix + 12), torch.randn(size, dtype=torch.float64)
    map_ = DepthwiseConv2d(size, grid=(3, 4), prefix=prefix)
    image = x[:, :, prefix:].flatten(0, 1).transpose(1, 2).unflatten(2, (3, 4))
    top, left = ((s - 1) // 2 for s in size)
    image = pad(image, (left, size[1] - 1 - left, top, size[0] - 1 - top))
    expected = conv2d(image, kernel.expand(3, 1, -1, -1), groups=3).flatten(2).transpose(1, 2).unflatten(0, (2, 2))
    out = map_.tokens(x, {"conv_kernel": kernel})
    assert torch.equal(out[:, :, :prefix], x[:, :, :prefix])
    torch.testing.assert_close(out[:, :, prefix:], expected, **TIGHT)
    assert torch.equal(map_.tokens(x, {}), x)


def test_a_2d_kernel_may_be_given_by_its_side():
    assert DepthwiseConv2d(3) == DepthwiseConv2d((3, 3))


def test_without_a_grid_the_patches_are_a_square():
    assert grid_of("here", 9, None, 0) == (3, 3)
    assert grid_of("here", 17, None, 1) == (4, 4)
    x, kernel = tokens(10), torch.randn(2, 2, dtype=torch.float64)
    square = DepthwiseConv2d(prefix=1).tokens(x, {"conv_kernel": kernel})
    assert torch.equal(square, DepthwiseConv2d(grid=(3, 3), prefix=1).tokens(x, {"conv_kernel": kernel}))


@pytest.mark.parametrize(
    ("grid", "prefix", "message"),
    [
        (None, 0, "7 tokens less 0 prefix tokens are 7, not a square; give grid="),
        (None, 7, "7 tokens less 7 prefix tokens are 0, not a square"),
        (None, 9, "are -2, not a square"),
        ((2, 3), 0, "grid 2×3 and 0 prefix tokens make 6 tokens, but the sequence has 7"),
        ((2, 3), 2, "make 8 tokens, but the sequence has 7"),
    ],
)
def test_a_grid_that_does_not_fit_is_an_error_that_counts(grid, prefix, message):
    with pytest.raises(ValueError, match=message):
        DepthwiseConv2d(grid=grid, prefix=prefix).tokens(tokens(7), {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be"),
        ({"size": (2, 0)}, "size must be a pair of positive integers"),
        ({"size": (2, 2, 2)}, "size must be a pair of positive integers"),
        ({"grid": (2, 0)}, "grid must be a pair of positive integers"),
        ({"grid": 4}, "grid must be a pair of positive integers"),
        ({"prefix": -1}, "prefix must be an integer of at least 0"),
    ],
    ids=str,
)
def test_a_2d_convolution_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DepthwiseConv2d(**arguments)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None], ids=repr)
def test_the_size_of_a_1d_convolution_is_a_count(size):
    with pytest.raises(ValueError, match="size must be an integer of at least 1, got"):
        DepthwiseConv1d(size)


def test_a_class_token_before_the_patches_is_answered_with_the_prefix_that_keeps_it():
    x = torch.randn(1, 2, 17, 4)
    for primal in (mechanism("conv2d"), mechanism("conv2d", grid=(4, 4))):
        with pytest.raises(ValueError, match=r"give prefix=1 if the first (token is no patch, or|are no pa)"):
            attention(x, x, x, primal)
    assert attention(x, x, x, mechanism("conv2d", prefix=1)).shape == x.shape
    with pytest.raises(ValueError, match=r"18 tokens less 1 prefix tokens are 17, not a square; give prefix=2 if"):
        attention(*[torch.randn(1, 2, 18, 4)] * 3, mechanism("conv2d", prefix=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("map_", [Recenter(), Recenter(0.5), BatchNorm()], ids=repr)
def test_a_mean_far_over_the_spread_costs_no_more_than_the_rounding_of_the_points(map_, dtype):
    keys = (1000 + tokens(length=64)).to(dtype)
    for seen in (None, (torch.arange(64) < 50).expand(*keys.shape[:2], -1)):
        kept = keys if seen is None else keys.masked_fill(~seen.unsqueeze(-1), 0.0)
        found = map_.apply(kept, moments(map_, kept, seen), {})
        exact = map_.apply(kept.double(), moments(map_, kept.double(), seen), {})
        # the mean of numbers near 1000 is known to a few units in the last place of float32
        budget = torch.finfo(dtype).eps * exact.abs() + 4 * 1000 * torch.finfo(torch.float32).eps * (1 + exact.abs())
        assert ((found.double() - exact).abs() <= budget).all()


def test_a_mean_far_over_the_spread_costs_no_more_where_padding_and_a_mask_hide_keys():
    q, k, v = (torch.randn(1, 2, 60, 8) for _ in range(3))
    masks = {"attn_mask": torch.rand(60, 60) < 0.1, "key_padding_mask": torch.arange(60)[None] >= 30}
    results = []
    for impl, dtype in (("auto", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        far = ((x + 1000).to(dtype) for x in (q, k))
        results.append(attention(*far, v.to(dtype), mechanism("bn", full=True), impl=impl, **masks).double())
    found, rough, exact = results
    # of 200 draws the worst was 4.7 times the reference's own error in float32
    assert (found - exact).abs().max() <= 8 * (rough - exact).abs().max()


@pytest.mark.parametrize("primal", [Primal(inputs=(DepthwiseConv1d(3),)), Primal(inputs=(DepthwiseConv2d(),))], ids=str)
def test_a_convolution_that_looks_ahead_has_no_causal_form(primal):
    q = torch.randn(1, 1, 4, 2)
    with pytest.raises(CausalFormError, match=r"looks ahead|later ones"):
        attention(q, q, q, primal, is_causal=True)


def test_padded_tokens_are_zero_before_a_convolution():
    q, k, v = tokens(), tokens(), tokens()
    hidden = torch.arange(7) >= torch.tensor([[7], [5]])
    primal, kernel = Primal(inputs=(DepthwiseConv1d(3),)), {"conv_kernel": torch.randn(3, dtype=torch.float64)}

    def out(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        masks = {"key_padding_mask": hidden, "query_padding_mask": hidden}
        return attention(q, k, v, primal, **masks, parameters=kernel).masked_fill(hidden[:, None, :, None], 0.0)

    junk = torch.where(hidden[:, None, :, None], 9.0, 0.0)
    assert torch.equal(out(q + junk, k + junk), out(q, k))
    shorter = attention(q[1:, :, :5], k[1:, :, :5], v[1:, :, :5], primal, parameters=kernel)
    torch.testing.assert_close(out(q, k)[1:, :, :5], shorter, **TIGHT)
