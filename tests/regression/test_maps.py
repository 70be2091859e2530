"""The maps of an attention call: what the layer uses, a few queries at a time."""

import pytest
import torch
from torch import Tensor, nn

from primaldual import MultiheadAttention, Primal, attention, mechanism
from primaldual.primal import DepthwiseConv1d, Pooled
from primaldual.regression import maps
from primaldual.regression.calls import attention_calls
from primaldual.regression.maps import head_maps, refusal
from support.battery import HEADS, PRIMALS

DIM, N = 4, 9
E = HEADS * DIM
PADDING = torch.arange(N) >= torch.tensor([[N], [6], [4]])
CAUSAL = ("softmax", "bn", "sh", "bn+sh", "linear-sh", "sparse-bn+sh", "sh-conv1d-causal", "rms-then-bn")


def layer_of(primal: Primal, **options) -> MultiheadAttention:
    layer = MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64, mechanism=primal, **options)
    with torch.no_grad():
        for parameter in layer.learned.values():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


def series(batch: int = 3) -> Tensor:
    return torch.randn(batch, N, E, dtype=torch.float64)


def recorded(layer: nn.Module, x: Tensor, **options):
    (call,) = attention_calls(layer, {"query": x, "key": x, "value": x, "need_weights": False} | options, solved=True)
    return call


def whole(call, pooling: maps.Pooling = "shared") -> Tensor:
    return torch.stack([head_maps(call, case, pooling) for case in range(call.queries.shape[0])])


@pytest.fixture(params=[maps.AT_ONCE, 2 * HEADS * N], ids=["at once", "two queries at a time"])
def at_once(request, monkeypatch) -> None:
    monkeypatch.setattr(maps, "AT_ONCE", request.param)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", PRIMALS)
def test_maps_are_the_weights_of_the_reference(name):
    layer, x = layer_of(PRIMALS[name]), series()
    call = recorded(layer, x, key_padding_mask=PADDING)
    if name in ("sh-max", "sh-conv"):
        assert refusal(call) == f"{name[3:]} pooling has no weights over tokens"
        return
    _, weights = attention(
        call.queries, call.keys, call.values, call.primal.ungated, key_padding_mask=PADDING, query_padding_mask=PADDING,
        parameters=call.parameters, impl="reference", need_weights=True,
    )  # fmt: skip
    assert refusal(call) is None
    torch.testing.assert_close(whole(call), weights)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_maps_are_the_weights_of_the_layer(name):
    layer, x = layer_of(PRIMALS[name]), series()
    _, weights = layer(x, x, x, key_padding_mask=PADDING, is_causal=True, average_attn_weights=False)
    torch.testing.assert_close(whole(recorded(layer, x, key_padding_mask=PADDING, is_causal=True)), weights)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", ["softmax", "bn", "bn-full", "linear", "sparse-bn"])
@pytest.mark.parametrize("kind", ["bool", "float", "of each head"])
def test_masks_and_biases_on_scores_are_those_of_the_layer(name, kind):
    layer, x = layer_of(PRIMALS[name]), series()
    hidden = torch.rand(N, N) < 0.3
    mask = {
        "bool": hidden, "float": torch.randn(N, N, dtype=torch.float64).masked_fill(hidden, -torch.inf),
        "of each head": torch.rand(3 * HEADS, N, N) < 0.3,
    }[kind]  # fmt: skip
    _, weights = layer(x, x, x, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(whole(recorded(layer, x, attn_mask=mask)), weights)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "options", [{"scale": 0.9}, {"add_bias_kv": True}, {"add_zero_attn": True, "add_bias_kv": True}], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_factor_on_the_scores_and_keys_beyond_the_tokens_take_part(options, causal):
    layer, x = layer_of(Primal(), **options), series()
    _, weights = layer(x, x, x, average_attn_weights=False, is_causal=causal)
    found = whole(recorded(layer, x, is_causal=causal))
    torch.testing.assert_close(found[..., : weights.shape[-1]], weights)
    torch.testing.assert_close(found.sum(-1), torch.ones(3, HEADS, N, dtype=torch.float64))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("masked", [False, True])
def test_queries_that_are_the_last_of_a_longer_sequence_keep_their_places(masked):
    layer, x = layer_of(mechanism("sparse-bn" if masked else "sparse-sh", stride=3)), series()
    options = {"key": x, "value": x, "is_causal": True, "query_offset": 4}
    options |= {"attn_mask": torch.rand(N - 4, N) < 0.3} if masked else {}
    _, weights = layer(x[:, 4:], average_attn_weights=False, **options)
    torch.testing.assert_close(whole(recorded(layer, x[:, 4:], **options)), weights)


def test_whose_padding_it_is_matters_to_convolutions():
    layer, x = layer_of(Primal(inputs=(DepthwiseConv1d(3),))), series()
    options = {"key_padding_mask": PADDING, "query_padding_mask": torch.zeros_like(PADDING)}
    _, weights = layer(x, x, x, average_attn_weights=False, **options)
    torch.testing.assert_close(whole(recorded(layer, x, **options)), weights)
    assert not torch.allclose(whole(recorded(layer, x, key_padding_mask=PADDING)), weights)


def test_a_layer_that_solves_for_its_values_has_maps_too():
    from primaldual.nn import SolvedAttention

    layer, x = SolvedAttention(E, HEADS, loss="squared", mechanism="bn+sh", dtype=torch.float64), series()
    _, weights = layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(whole(recorded(layer, x)), weights)


def test_half_precision_is_not_that_of_the_maps():
    layer, x = layer_of(mechanism("bn+sh")).to(torch.bfloat16), series().to(torch.bfloat16)
    call = recorded(layer, x)
    _, weights = attention(
        call.queries.double(), call.keys.double(), call.values.double(), call.primal, need_weights=True,
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        found = whole(call)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("how", ["mean", "max", "conv"])
def test_where_weights_are_repeated_rows_sum_to_the_scale_of_their_head(how):
    scales = (1, 1, 3, 3, 9, 9)
    call = recorded(layer_of(Primal(training_set=Pooled(scales, how=how))), series())
    wanted = torch.tensor(scales, dtype=torch.float64)[None, :, None].expand(3, -1, N)
    torch.testing.assert_close(whole(call, "repeated").sum(-1), wanted)
