"""What a layer cannot do is an error that says what was given and what is expected."""

import pytest
import torch

from nn.layers import E, H, L, N, make
from primaldual import MultiheadAttention, Primal, mechanism
from primaldual.ops import UnsupportedError

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 10, "num_heads": 4}, "positive multiple of num_heads, got embed_dim=10, num_heads=4"),
        ({"embed_dim": 0, "num_heads": 4}, "positive multiple of num_heads, got embed_dim=0, num_heads=4"),
        ({"num_heads": 0}, "positive multiple of num_heads, got embed_dim=16, num_heads=0"),
        ({"mechanism": mechanism("sh", scales=(1, 2))}, r"2 scales \(1, 2\) for 4 heads"),
        (
            {"mechanism": "bn", "add_bias_kv": True},
            "add_bias_kv and add_zero_attn exist for softmax attention, not for",
        ),
        ({"mechanism": "sh", "add_zero_attn": True}, "add_bias_kv and add_zero_attn exist for softmax attention"),
        ({"mechanism": "sofmax"}, "unknown mechanism 'sofmax'; did you mean 'softmax'"),
        ({"projection": "conv"}, "projection must be 'linear', 'shared' or a ConvProjection, got 'conv'"),
        ({"projection": "shared", "kdim": 8}, "needs kdim and vdim equal to embed_dim=16, got 8, 16"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_a_layer_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**({"embed_dim": E, "num_heads": H} | arguments))


def test_bias_kv_goes_with_softmax_that_has_a_bias_or_a_residual():
    x = torch.randn(N, L, E)
    for primal in (Primal(bias=True), Primal(residual=True)):
        layer = MultiheadAttention(E, H, batch_first=True, add_bias_kv=True, mechanism=primal)
        assert layer(x, x, x)[1].shape == (N, L, L + 1)


LAYERS_WITH_A_PATH_OF_THEIR_OWN = {
    "softmax": Primal(),
    "linear": mechanism("linear"),
    "pooled": mechanism("sh", scales=(2, 2, 2, 2)),
    "partly pooled": mechanism("sh"),
}


@pytest.mark.parametrize("needed", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("primal", LAYERS_WITH_A_PATH_OF_THEIR_OWN.values(), ids=LAYERS_WITH_A_PATH_OF_THEIR_OWN)
@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (torch.zeros(N, L + 1, dtype=torch.bool), r"key_padding_mask must be .*\[2, 9\], got \[2, 10\]"),
        (torch.zeros(L, dtype=torch.bool), r"key_padding_mask must be .*\[2, 9\], got \[9\]"),
        (torch.zeros(N, 1, L, dtype=torch.bool), r"key_padding_mask must be .*\[2, 9\], got \[2, 1, 9\]"),
        (
            torch.zeros(N, L, dtype=torch.long),
            "key_padding_mask must be boolean .* or floating point .*, got torch.int64",
        ),
    ],
    ids=["length", "rank 1", "rank 3", "integers"],
)
def test_a_padding_mask_that_does_not_fit_is_an_error_that_says_so(primal, needed, padding, message):
    layer, x = make(primal), torch.randn(N, L, E, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        layer(x, x, x, key_padding_mask=padding, need_weights=needed)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(L, L + 1, dtype=torch.bool), r"attn_mask must be .*\[9, 9\].*, got \[9, 10\]"),
        (torch.zeros(N, L, L, dtype=torch.bool), r"\[batch·heads, queries, keys\] = \[8, 9, 9\], got \[2, 9, 9\]"),
        (torch.zeros(N, H, L, L, dtype=torch.bool), r"\[8, 9, 9\], got \[2, 4, 9, 9\]"),
        (torch.zeros(L, dtype=torch.bool), r"\[8, 9, 9\], got \[9\]"),
        (torch.zeros(L, L, dtype=torch.long), "attn_mask must be boolean .* or floating point .*, got torch.int64"),
    ],
    ids=["length", "batch without heads", "rank 4", "rank 1", "integers"],
)
def test_an_attention_mask_that_does_not_fit_is_an_error_that_says_so(mask, message):
    layer, x = make("softmax"), torch.randn(N, L, E, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        layer(x, x, x, attn_mask=mask)


def test_masks_that_do_not_fit_are_described_as_they_were_given_when_a_key_is_appended():
    layer = MultiheadAttention(E, H, batch_first=True, add_bias_kv=True)
    x = torch.randn(N, L, E)
    with pytest.raises(ValueError, match=r"\[9, 9\].*, got \[9, 8\]"):
        layer(x, x, x, attn_mask=torch.zeros(L, L - 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\[2, 9\], got \[2, 8\]"):
        layer(x, x, x, key_padding_mask=torch.zeros(N, L - 1, dtype=torch.bool))


def test_pooled_heads_refuse_a_mask_over_single_keys():
    layer, x = make("sh"), torch.randn(N, L, E, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"attn_mask hides single keys, but heads of scales \(1, 1, 2, 2\)"):
        layer(x, x, x, attn_mask=torch.zeros(L, L, dtype=torch.bool), need_weights=False)


@pytest.mark.parametrize("shapes", [((E,), (E,), (E,)), ((N, L, E), (L, E), (L, E)), ((1, N, L, E),) * 3], ids=str)
def test_wrong_ranks_are_an_error_that_shows_the_shapes(shapes):
    with pytest.raises(ValueError, match=r"must all be 3-D \(batched\) or all 2-D \(unbatched\), got"):
        make("softmax")(*(torch.randn(shape, dtype=torch.float64) for shape in shapes))


@pytest.mark.parametrize("primal", LAYERS_WITH_A_PATH_OF_THEIR_OWN.values(), ids=LAYERS_WITH_A_PATH_OF_THEIR_OWN)
@pytest.mark.parametrize(
    ("key", "value"), [((N, 4, E), (N, 3, E)), ((N + 1, 4, E), (N + 1, 4, E))], ids=["lengths", "batch"]
)
def test_keys_and_values_that_do_not_agree_are_an_error(primal, key, value):
    layer, x = make(primal), torch.randn(N, L, E, dtype=torch.float64)
    with pytest.raises(ValueError, match="must agree in"):
        layer(x, torch.randn(key, dtype=torch.float64), torch.randn(value, dtype=torch.float64), need_weights=False)


def test_an_executor_that_cannot_run_the_mechanism_says_so():
    x = torch.randn(N, L, E, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"impl='linear' cannot compute this: .*not finite; impl='sdpa' can"):
        make("softmax", impl="linear")(x, x, x, need_weights=False)
    with pytest.raises(UnsupportedError, match=r"impl='sdpa' cannot compute this: .*exponential kernel"):
        make("linear", impl="sdpa")(x, x, x, need_weights=False)
    with pytest.raises(ValueError, match=r"impl must be one of auto, .*got 'fast'"):
        make("softmax", impl="fast")(x, x, x)


x = torch.randn(N, L, E)
padding, mask = torch.zeros(N, L, dtype=torch.bool), torch.zeros(L, L, dtype=torch.bool)


@pytest.mark.parametrize("needed", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("name", ["softmax", "sh", "linear"])
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((x.numpy(), x, x), TypeError, r"query must be a torch.Tensor, got numpy.ndarray; torch.from_numpy\(...\)"),
        ((x, None, x), TypeError, "key must be a torch.Tensor, got None"),
        ((x, x, x.tolist()), TypeError, "value must be a torch.Tensor, got list"),
        ((x, x, x, padding.numpy()), TypeError, "key_padding_mask must be a torch.Tensor, got numpy.ndarray"),
        ((x, x, x, padding.to("meta")), ValueError, "key_padding_mask is on meta, the inputs are on cpu; move it"),
        ((x.long(), x, x), ValueError, "query must be floating point, got torch.int64"),
        (
            (x, x, x.to(torch.float8_e4m3fn)),
            ValueError,
            "value must be floating point, got torch.float8_e4m3fn; ",
        ),
        (
            (x.half(), x, x),
            ValueError,
            r"query is torch.float16, the layer's parameters are torch.float32; give query.to\(torch.float32\), or "
            r"convert the layer with layer.to\(torch.float16\); under torch.autocast\('cpu'\)",
        ),
        ((x, x.double(), x), ValueError, r"key is torch.float64, .* with layer.to\(torch.float64\)$"),
        ((x.to("meta"),) * 3, ValueError, "query is on meta, the layer's parameters are on cpu; move one"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_no_layer_computes_with_is_refused_by_name(name, needed, arguments, kind, message):
    layer = MultiheadAttention(E, H, batch_first=True, mechanism=name)
    with pytest.raises(kind, match=message):
        layer(*arguments, need_weights=needed)


def test_masks_for_each_query_are_refused_by_name():
    layer = MultiheadAttention(E, H, batch_first=True)
    with pytest.raises(ValueError, match="attn_mask is on meta, the inputs are on cpu"):
        layer(x, x, x, attn_mask=mask.to("meta"))
    with pytest.raises(TypeError, match=r"attn_mask must be a torch.Tensor, got numpy.ndarray"):
        layer(x, x, x, attn_mask=mask.numpy())
    with pytest.raises(ValueError, match="query_padding_mask is on meta"):
        layer(x, x, x, query_padding_mask=padding.to("meta"))


def test_autocast_takes_what_it_converts_and_no_more():
    layer = MultiheadAttention(E, H, batch_first=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, x.bfloat16(), x.half())[0].dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"query is torch.float64, .* with layer.to\(torch.float64\)$"):
            layer(x.double(), x, x)
