"""Layers whose queries are the last tokens of a longer sequence, and whose scores have a factor of their own."""

import pytest
import torch
from torch import nn

from primaldual import MultiheadAttention, TransformerEncoderLayer
from primaldual.nn import ConvProjection
from primaldual.ops import layer as routes
from primaldual.regression import diagnose


def made(mechanism: str, **options) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(24, 4, batch_first=True, dtype=torch.float64, mechanism=mechanism, **options).eval()


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "bn+sh", "linear", "sparse-sh", "qk-norm"])
def test_the_last_tokens_alone_give_the_last_rows_of_the_whole(name: str, weights: bool) -> None:
    if name == "linear" and weights:
        weights = False  # in one test is enough
    layer, x = made(name), torch.randn(2, 11, 24, dtype=torch.float64)
    whole, shares = layer(x, x, x, is_causal=True, need_weights=weights)
    part, share = layer(x[:, 7:], x, x, is_causal=True, need_weights=weights, query_offset=7)
    torch.testing.assert_close(part, whole[:, 7:])
    if weights:
        torch.testing.assert_close(share, shares[:, 7:])


def test_extra_keys_are_seen_beside_an_offset() -> None:
    layer, x = made("softmax", add_bias_kv=True, add_zero_attn=True), torch.randn(1, 9, 24, dtype=torch.float64)
    whole, _ = layer(x, x, x, is_causal=True)
    torch.testing.assert_close(layer(x[:, 4:], x, x, is_causal=True, query_offset=4)[0], whole[:, 4:])


@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "bn+sh", "sparse"])
def test_the_scale_takes_the_place_of_the_root_of_the_head_dimension(name: str) -> None:
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    usual, same, other = made(name), made(name, scale=6**-0.5), made(name, scale=0.9)
    given = {"need_weights": False}
    torch.testing.assert_close(same(x, x, x, **given)[0], usual(x, x, x, **given)[0])
    assert not torch.allclose(other(x, x, x, **given)[0], usual(x, x, x, **given)[0])
    dense = made(name, scale=0.9, impl="reference")
    torch.testing.assert_close(other(x, x, x, **given)[0], dense(x, x, x, **given)[0])
    assert "scale=0.9" in repr(other)


def test_softmax_with_a_scale_is_torch_s_own() -> None:
    layer, x = made("softmax", scale=0.3), torch.randn(2, 5, 24, dtype=torch.float64)
    q, k, v = (layer.split(part) for part in nn.functional.linear(x, *layer.packed).chunk(3, -1))
    heads = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)


def test_an_encoder_layer_hands_the_scale_on() -> None:
    assert TransformerEncoderLayer(24, 4, scale=0.5).self_attn.scale == 0.5


def test_the_routes_with_kernels_of_their_own_leave_such_layers_to_the_others() -> None:
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    problem = made("bn", scale=0.9).state(x, x, x)
    assert routes.ROUTES["recentred_projection"].refusal(problem._replace(need_weights=False)) == (
        "the scores have a factor of their own"
    )


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    with pytest.raises(ValueError, match="scale must be a positive number"):
        made("softmax", scale=-1.0)
    with pytest.raises(ValueError, match="has no factor on q·k"):
        made("linear", scale=1.0)
    with pytest.raises(ValueError, match="query_offset must be an integer"):
        made("softmax")(x, x, x, query_offset=-2)
    with pytest.raises(ValueError, match="give the queries of the whole sequence"):
        made("softmax", projection=ConvProjection(3))(x[:, 3:], x, x, query_offset=3)
    with pytest.raises(ValueError, match="1/√head_dim on their scores"):
        diagnose(made("softmax", scale=0.9), (x, x, x))
