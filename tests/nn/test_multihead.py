"""The layer with every mechanism computes the reference, with all its gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn

from nn.layers import GRIDDED, LAYERS, MASKS, NOT_CAUSAL, E, H, L, N, each, make, reference_of
from primaldual import MultiheadAttention, Primal, attention, mechanism
from primaldual.ops import CausalFormError, UnsupportedError
from primaldual.primal import DepthwiseConv1d, KernelSum, Pooled, Recenter

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def assert_alike(layer: MultiheadAttention, *given: Tensor, **call) -> None:
    """The layer and the reference give the same output and the same gradients, of inputs and of all parameters."""
    slow = reference_of(layer)
    out, expected = layer(*given, need_weights=False, **call)[0], slow(*given, need_weights=False, **call)[0]
    torch.testing.assert_close(out, expected, **CLOSE)
    distinct = list({id(x): x for x in given}.values())
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    names = [name for name, _ in layer.named_parameters()]
    found, wanted = (
        torch.autograd.grad((o * cotangent).sum(), [*distinct, *m.parameters()])
        for o, m in ((out, layer), (expected, slow))
    )
    for name, gradient, reference in zip([*map(str, range(len(distinct))), *names], found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, **CLOSE, msg=lambda m, name=name: f"gradient of {name}: {m}")
        if name.startswith(("learned", "mechanism_bias")):
            assert (gradient.abs() > 1e-9).all() or ("pool_kernel" in name and gradient.abs().max() > 1e-9), name


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@each()
def test_self_attention_and_all_its_gradients_are_the_references(primal, mask):
    x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    assert_alike(make(primal), x, x, x, key_padding_mask=mask)


@pytest.mark.parametrize("mask", [MASKS["no mask"], MASKS["float padding"]], ids=["no mask", "float padding"])
@each()
def test_cross_attention_and_all_its_gradients_are_the_references(primal, mask):
    x = torch.randn(N, 4, E, dtype=torch.float64, requires_grad=True)
    key, value = torch.randn(2, N, L, E, dtype=torch.float64, requires_grad=True).unbind()
    assert_alike(make(primal), x, key, value, key_padding_mask=mask)


@pytest.mark.parametrize("mask", [MASKS["no mask"], MASKS["float padding"]], ids=["no mask", "float padding"])
@each()
def test_causal_attention_is_the_references_or_refused(primal, mask):
    x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    layer = make(primal)
    if primal.causal_refusal(H) is None:
        assert_alike(layer, x, x, x, key_padding_mask=mask, is_causal=True)
        hint = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
        hinted = layer(x, x, x, attn_mask=hint, key_padding_mask=mask, is_causal=True, need_weights=False)[0]
        assert torch.equal(hinted, layer(x, x, x, key_padding_mask=mask, is_causal=True, need_weights=False)[0])
    else:
        with pytest.raises(CausalFormError, match="is_causal=True: "):
            layer(x, x, x, is_causal=True)


@each(without=NOT_CAUSAL)
def test_a_causal_output_does_not_see_the_future(primal):
    layer, x = make(primal), torch.randn(N, L, E, dtype=torch.float64)
    later = torch.cat([x[:, :6], torch.randn(N, L - 6, E, dtype=torch.float64)], dim=1)
    before, after = (layer(t, t, t, is_causal=True, need_weights=False)[0] for t in (x, later))
    torch.testing.assert_close(before[:, :6], after[:, :6], **CLOSE)
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-3


@each()
def test_weights_come_with_the_same_output_and_sum_to_one(primal):
    layer, x = make(primal), torch.randn(N, L, E, dtype=torch.float64)
    pooling = primal.training_set
    if isinstance(pooling, Pooled) and pooling.how in ("max", "conv"):
        with pytest.raises(UnsupportedError, match=f"{pooling.how} pooling has no weights over tokens"):
            layer(x, x, x)
        return
    padding = MASKS["bool padding"]
    alone, none = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    output, mean = layer(x, x, x, key_padding_mask=padding)
    _, weights = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    assert none is None
    torch.testing.assert_close(output, alone, **CLOSE)
    assert weights.shape == (N, H, L, L)
    torch.testing.assert_close(mean, weights.mean(1), **CLOSE)
    assert (weights[1, :, :, 5:] == 0).all()
    if primal.normalizer == KernelSum():
        total = weights.sum(-1)[:, :, :5]  # a window beyond the last key that is kept may see none
        torch.testing.assert_close(total, torch.ones_like(total), **CLOSE)


@each(without=GRIDDED)
def test_padding_never_changes_what_is_kept(primal):
    layer, x = make(primal), torch.randn(1, 6, E, dtype=torch.float64)
    longer = torch.cat([x, torch.randn(1, 3, E, dtype=torch.float64)], dim=1)
    padded = layer(longer, longer, longer, key_padding_mask=torch.arange(9)[None] >= 6, need_weights=False)[0]
    torch.testing.assert_close(padded[:, :6], layer(x, x, x, need_weights=False)[0], **CLOSE)


@each()
def test_a_row_without_keys_gives_the_output_of_zero_heads_and_finite_gradients(primal):
    layer = make(primal)
    x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * L, [True] * L])
    for needed in (False, True):
        try:
            output, _ = layer(x, x, x, key_padding_mask=padding, need_weights=needed)
        except UnsupportedError:
            assert needed
            continue
        bias = torch.zeros(E, dtype=torch.float64) if layer.mechanism_bias is None else layer.mechanism_bias.flatten()
        expected = layer.out_proj(bias).expand(L, -1)
        torch.testing.assert_close(output[1], expected + x[1] if primal.residual else expected, **CLOSE)
        gradients = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
        assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("length", [1, 3])
@each(without=GRIDDED)
def test_short_sequences_are_no_special_case(primal, length):
    x = torch.randn(N, length, E, dtype=torch.float64, requires_grad=True)
    layer = make(primal)
    torch.testing.assert_close(
        layer(x, x, x, need_weights=False)[0], reference_of(layer)(x, x, x, need_weights=False)[0], **CLOSE
    )


def test_what_is_learned_starts_as_the_spec_says():
    primal = Primal(
        inputs=(DepthwiseConv1d(3), Recenter(0.25, True)), training_set=Pooled((1, 2, 1, 2), "conv"), bias=True
    )
    layer = MultiheadAttention(E, H, mechanism=primal)
    assert {name: p.tolist() for name, p in layer.learned.items()} == {
        "conv_kernel": [0.0, 1.0, 0.0],
        "beta": [0.25] * 4,
        "pool_kernel_2": [[0.5, 0.5]] * 2,
    }
    assert torch.equal(layer.mechanism_bias, torch.zeros(H, E // H))


@pytest.mark.parametrize(
    ("primal", "plain"),
    [
        ("conv1d", "softmax"),
        ("conv2d", "softmax"),
        (mechanism("bn", beta=0.3, learnable=True), mechanism("bn", beta=0.3)),
        (mechanism("sh", how="conv"), "sh"),
        (Primal(bias=True), "softmax"),
    ],
    ids=["conv1d", "conv2d", "learnable beta", "conv pooling", "bias"],
)
def test_a_layer_that_learns_starts_as_the_one_that_does_not(primal, plain):
    torch.manual_seed(1)
    learning = MultiheadAttention(E, H, batch_first=True, mechanism=primal)
    torch.manual_seed(1)
    fixed = MultiheadAttention(E, H, batch_first=True, mechanism=plain)
    x = torch.randn(N, L, E)
    torch.testing.assert_close(
        learning(x, x, x, need_weights=False)[0], fixed(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-6
    )


def test_the_layer_is_attention_between_its_projections():
    layer, x = make(LAYERS["learnable beta, apart scales"]), torch.randn(N, L, E, dtype=torch.float64)
    q, k, v = (x @ layer.in_proj_weight.T + layer.in_proj_bias).unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)
    heads = attention(q, k, v, layer.primal, parameters=dict(layer.learned.items()), impl="reference")
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected, **CLOSE)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("how", ["mean", "conv"])
def test_heads_of_one_scale_that_stand_apart_are_what_each_is_alone(how, impl):
    scales = (2, 1, 3, 2)
    inputs = (Recenter(0.5, learnable=True),)
    layer, x = make(Primal(inputs=inputs, training_set=Pooled(scales, how)), impl=impl), torch.randn(N, L, E).double()
    nn.init.eye_(layer.out_proj.weight)
    nn.init.zeros_(layer.out_proj.bias)
    found = layer(x, x, x, need_weights=False)[0].unflatten(-1, (H, -1))
    q, k, v = (x @ layer.in_proj_weight.T + layer.in_proj_bias).unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)
    for head, scale in enumerate(scales):
        own = {"beta": layer.learned["beta"][head : head + 1]}
        if how == "conv" and scale > 1:
            place = scales[:head].count(scale)
            own[f"pool_kernel_{scale}"] = layer.learned[f"pool_kernel_{scale}"][place : place + 1]
        alone = Primal(inputs=inputs, training_set=Pooled((scale,), how))
        one = slice(head, head + 1)
        expected = attention(q[:, one], k[:, one], v[:, one], alone, parameters=own)
        torch.testing.assert_close(found[:, :, head], expected[:, 0], **CLOSE)


@pytest.mark.parametrize("pooled", [False, True], ids=["all keys", "pooled"])
def test_the_bias_is_added_to_every_head_before_the_output_projection(pooled):
    training_set = {"training_set": Pooled((1, 2, 2, 1))} if pooled else {}
    layer, x = make(Primal(bias=True, **training_set)), torch.randn(N, L, E, dtype=torch.float64)
    without = copy.deepcopy(layer)
    without.mechanism_bias = None
    difference = layer(x, x, x, need_weights=False)[0] - without(x, x, x, need_weights=False)[0]
    expected = (layer.out_proj.weight @ layer.mechanism_bias.flatten()).expand_as(difference)
    torch.testing.assert_close(difference, expected, **CLOSE)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dims", [2, 3], ids=["unbatched", "batched"])
@pytest.mark.parametrize("pooled", [False, True], ids=["all keys", "pooled"])
def test_the_residual_is_the_query_input(batch_first, dims, pooled):
    training_set = {"training_set": Pooled((1, 2, 2, 1))} if pooled else {}
    layer = make(Primal(residual=True, **training_set))
    layer.batch_first = batch_first
    without = copy.deepcopy(layer)
    without.primal = Primal(**training_set)
    x = torch.randn((N, L, E)[3 - dims :], dtype=torch.float64)
    for needed in (True, False):
        difference = layer(x, x, x, need_weights=needed)[0] - without(x, x, x, need_weights=needed)[0]
        torch.testing.assert_close(difference, x, **CLOSE)


@each()
def test_batch_first_and_unbatched_are_the_same_numbers(primal):
    layer, x = make(primal), torch.randn(N, L, E, dtype=torch.float64)
    expected = layer(x, x, x, need_weights=False)[0]
    for row in range(N):
        torch.testing.assert_close(layer(x[row], x[row], x[row], need_weights=False)[0], expected[row], **CLOSE)
    layer.batch_first = False
    y = x.transpose(0, 1)
    torch.testing.assert_close(layer(y, y, y, need_weights=False)[0].transpose(0, 1), expected, **CLOSE)
