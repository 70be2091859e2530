"""How a layer makes queries, keys and values: convolutional and shared projections."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, pad

from nn.layers import MASKS, E, H, L, N, make, reference_of
from primaldual import MultiheadAttention, TransformerEncoderLayer, attention, mechanism
from primaldual.nn import ConvProjection
from primaldual.nn.projection import DepthwiseConv
from primaldual.ops import CausalFormError

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
PROJECTIONS = {
    "1-D": ConvProjection(3, dims=1),
    "1-D, even": ConvProjection(4, dims=1),
    "2-D, square": ConvProjection(3),
    "2-D, grid and prefix": ConvProjection(2, grid=(2, 4), prefix=1),
}


def tokens(length: int = L) -> Tensor:
    return torch.randn(N, length, E, dtype=torch.float64)


def output(layer: MultiheadAttention, x: Tensor, **call) -> Tensor:
    return layer(x, x, x, need_weights=False, **call)[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12])
def test_a_1d_convolution_is_torchs_with_a_kernel_per_channel(size):
    module = DepthwiseConv(E, ConvProjection(size, dims=1), dtype=torch.float64)
    nn.init.normal_(module.kernel)
    x, left = tokens(), (size - 1) // 2
    channels = pad(x.transpose(1, 2), (left, size - 1 - left))
    expected = conv1d(channels, module.kernel.T.unsqueeze(1), groups=E).transpose(1, 2)
    torch.testing.assert_close(module(x), expected, **CLOSE)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("prefix", [0, 2])
def test_a_2d_convolution_is_torchs_with_a_kernel_per_channel_and_leaves_the_prefix_alone(size, prefix):
    module = DepthwiseConv(E, ConvProjection(size, grid=(3, 4), prefix=prefix), dtype=torch.float64)
    nn.init.normal_(module.kernel)
    x, before = tokens(prefix + 12), (size - 1) // 2
    image = x[:, prefix:].transpose(1, 2).unflatten(2, (3, 4))
    image = pad(image, (before, size - 1 - before) * 2)
    expected = conv2d(image, module.kernel.permute(2, 0, 1).unsqueeze(1), groups=E).flatten(2).transpose(1, 2)
    torch.testing.assert_close(module(x)[:, prefix:], expected, **CLOSE)
    assert torch.equal(module(x)[:, :prefix], x[:, :prefix])


@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear", "sparse"])
def test_a_convolutional_projection_starts_as_the_linear_one(name, projection):
    torch.manual_seed(1)
    plain = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, mechanism=name)
    torch.manual_seed(1)
    convolved = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, mechanism=name, projection=projection)
    x = tokens()
    torch.testing.assert_close(output(convolved, x), output(plain, x), **CLOSE)


@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear-bn", "sparse"])
def test_the_layer_convolves_zeroed_padding_then_projects_then_attends(name, mask, projection):
    layer, x = make(name, projection=projection), tokens()
    hidden = torch.zeros(N, L, dtype=torch.bool)
    if mask is not None:
        hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    cleared = x.masked_fill(hidden.unsqueeze(-1), 0.0)
    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    q, k, v = (
        (layer.convolutions[part](cleared) @ weight.T + bias).unflatten(-1, (H, E // H)).transpose(1, 2)
        for part, weight, bias in zip("qkv", weights, biases, strict=True)
    )
    heads = attention(q, k, v, name, key_padding_mask=mask, impl="reference")
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(output(layer, x, key_padding_mask=mask), expected, **CLOSE)


@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
@pytest.mark.parametrize("mask", [MASKS["bool padding"], MASKS["float padding"]], ids=["bool", "float"])
def test_padded_tokens_do_not_leak_through_a_convolution(mask, projection):
    layer, x = make("softmax", projection=projection), tokens()
    hidden = (mask if mask.dtype == torch.bool else mask == -torch.inf).unsqueeze(-1)
    clean, junk = (output(layer, x + size * hidden, key_padding_mask=mask) for size in (0.0, 9.0))
    assert torch.equal(clean, junk)


@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
def test_every_kernel_learns(projection):
    layer, x = make("bn+sh", projection=projection), tokens()
    slow = reference_of(layer)
    kernels = [c.kernel for c in layer.convolutions.values()]
    found = torch.autograd.grad(output(layer, x).square().sum(), kernels)
    wanted = torch.autograd.grad(output(slow, x).square().sum(), [c.kernel for c in slow.convolutions.values()])
    for gradient, reference in zip(found, wanted, strict=True):
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(gradient, reference, **CLOSE)


def test_queries_keys_and_values_have_kernels_of_their_own_size():
    layer = MultiheadAttention(E, H, kdim=5, vdim=6, batch_first=True, projection=ConvProjection(3, dims=1))
    assert {name: tuple(c.kernel.shape) for name, c in layer.convolutions.items()} == {
        "q": (3, E),
        "k": (3, 5),
        "v": (3, 6),
    }
    out, _ = layer(torch.randn(N, 4, E), torch.randn(N, L, 5), torch.randn(N, L, 6))
    assert out.shape == (N, 4, E)


@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
def test_a_convolutional_projection_has_no_causal_form(projection):
    with pytest.raises(CausalFormError, match="a ConvProjection lets a token depend on later ones"):
        make("softmax", projection=projection)(*[tokens()] * 3, is_causal=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be an integer of at least 1, got 0"),
        ({"size": 2.5}, "size must be an integer of at least 1, got 2.5"),
        ({"dims": 3}, "dims must be 1 or 2, got 3"),
        ({"grid": (3,)}, r"grid must be a pair of positive integers, got \(3,\)"),
        ({"prefix": -1}, "prefix must be an integer of at least 0, got -1"),
        ({"dims": 1, "grid": (3, 3)}, "grid and prefix belong to dims=2"),
        ({"dims": 1, "prefix": 1}, "grid and prefix belong to dims=2"),
    ],
    ids=str,
)
def test_a_projection_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ConvProjection(**arguments)


def test_a_grid_that_does_not_fit_the_tokens_is_an_error():
    with pytest.raises(ValueError, match="8 tokens less 0 prefix tokens are 8, not a square"):
        output(make("softmax", projection=ConvProjection()), tokens(8))


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (torch.zeros(N, L + 1, dtype=torch.bool), r"key_padding_mask must be .*\[2, 9\], got \[2, 10\]"),
        (torch.zeros(L, dtype=torch.bool), r"key_padding_mask must be .*\[2, 9\], got \[9\]"),
    ],
    ids=["length", "rank"],
)
def test_a_padding_mask_that_does_not_fit_is_an_error_that_says_so(padding, message):
    with pytest.raises(ValueError, match=message):
        output(make("softmax", projection=ConvProjection(3, dims=1)), tokens(), key_padding_mask=padding)


@pytest.mark.parametrize("name", ["softmax", "bn", "bn+sh", "linear-bn", "sparse", "qk-norm"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_shared_projection_is_one_matrix_for_queries_and_keys(name, mask):
    shared, x = make(name, projection="shared"), tokens()
    assert shared.in_proj_weight.shape == (2 * E, E)
    apart = make(name)
    state = shared.state_dict()
    for part in ("in_proj_weight", "in_proj_bias"):
        both, value = state[part].chunk(2)
        state[part] = torch.cat([both, both, value])
    apart.load_state_dict(state, strict=True)
    found = output(shared, x, key_padding_mask=mask)
    torch.testing.assert_close(found, output(apart, x, key_padding_mask=mask), **CLOSE)
    torch.testing.assert_close(found, output(reference_of(shared), x, key_padding_mask=mask), **CLOSE)
    gradient = torch.autograd.grad(found.square().sum(), shared.in_proj_weight)[0]
    (separate,) = torch.autograd.grad(output(apart, x, key_padding_mask=mask).square().sum(), apart.in_proj_weight)
    q, k, v = separate.chunk(3)
    torch.testing.assert_close(gradient, torch.cat([q + k, v]), **CLOSE)


def test_a_shared_projection_makes_the_scores_of_self_attention_symmetric():
    layer, x = make("softmax", projection="shared"), tokens()
    _, weights = layer(x, x, x, average_attn_weights=False)
    scores = weights.log() - weights.log().diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    # log w_ij − log w_ii = s_ij − s_ii, so s_ij is symmetric when its differences to the diagonal say so
    cycle = scores[..., 0, 1] + scores[..., 1, 2] + scores[..., 2, 0]
    back = scores[..., 1, 0] + scores[..., 2, 1] + scores[..., 0, 2]
    torch.testing.assert_close(cycle, back, **CLOSE)


def test_a_block_takes_a_projection():
    block = TransformerEncoderLayer(
        E, H, batch_first=True, dropout=0.0, dtype=torch.float64, mechanism="bn", projection=ConvProjection(3, dims=1)
    )
    plain = copy.deepcopy(block)
    plain.self_attn.convolutions = None
    x = tokens()
    torch.testing.assert_close(block(x), plain(x), **CLOSE)
    nn.init.normal_(block.self_attn.convolutions["q"].kernel)
    assert (block(x) - plain(x)).abs().max() > 1e-3


def test_a_convolution_of_the_mechanism_goes_with_a_convolutional_projection():
    layer, x = make(mechanism("conv1d", size=3), projection=ConvProjection(3, dims=1)), tokens()
    torch.testing.assert_close(
        output(layer, x, key_padding_mask=MASKS["bool padding"]),
        output(reference_of(layer), x, key_padding_mask=MASKS["bool padding"]),
        **CLOSE,
    )
