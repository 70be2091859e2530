"""Inside torch's encoders the mechanism is never replaced by torch's fused softmax."""

import copy
import inspect
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from nn.layers import LAYERS, E, H, L, N
from primaldual import MultiheadAttention, Primal, TransformerEncoderLayer, mechanism, mechanisms
from primaldual.ops import CausalFormError

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
PADDING = torch.arange(L) >= torch.tensor([[L], [5]])
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)
MODES = {"gradients": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
NOT_SOFTMAX = [name for name in mechanisms() if name != "softmax"]

fused_path_warning = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")
nested_prototype = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")


def block(name: str | Primal, **options) -> TransformerEncoderLayer:
    options = {"dim_feedforward": 24, "batch_first": True, "dropout": 0.0, "dtype": torch.float64} | options
    layer = TransformerEncoderLayer(E, H, **options, mechanism=name)
    for parameter in layer.self_attn.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def torch_block(like: nn.TransformerEncoderLayer | None = None, **options) -> nn.TransformerEncoderLayer:
    options = {"dim_feedforward": 24, "batch_first": True, "dropout": 0.0, "dtype": torch.float64} | options
    layer = nn.TransformerEncoderLayer(E, H, **options)
    if like is not None:
        layer.load_state_dict(like.state_dict(), strict=False)
    return layer


def with_ours(layer: nn.TransformerEncoderLayer, name: str | Primal) -> nn.TransformerEncoderLayer:
    """torch's own layer with our attention in the place of its."""
    ours = MultiheadAttention(E, H, batch_first=layer.self_attn.batch_first, dtype=torch.float64, mechanism=name)
    ours.load_state_dict(layer.self_attn.state_dict(), strict=False)
    layer.self_attn = ours
    return layer


def encode(encoder: nn.Module, x: Tensor, mode, **masks) -> Tensor:
    with MODES[mode]():
        return encoder(x, **masks).detach().clone()


def by_hand(layer: nn.TransformerEncoderLayer, x: Tensor, **call) -> Tensor:
    """The block as written down: attention, residual, norm, feed-forward, residual, norm."""

    def attend(x: Tensor) -> Tensor:
        return layer.self_attn(x, x, x, need_weights=False, **call)[0]

    def feed(x: Tensor) -> Tensor:
        return layer.linear2(layer.activation(layer.linear1(x)))

    if layer.norm_first:
        x = x + attend(layer.norm1(x))
        return x + feed(layer.norm2(x))
    x = layer.norm1(x + attend(x))
    return layer.norm2(x + feed(x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh], ids=["relu", "gelu", "tanh"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_with_softmax_the_block_is_torchs(training, norm_first, activation, bias):
    options = {"norm_first": norm_first, "activation": activation, "bias": bias}
    ours = block("softmax", **options).train(training)
    theirs = torch_block(ours, **options).train(training)
    x = torch.randn(N, L, E, dtype=torch.float64)
    for call in ({}, {"src_key_padding_mask": PADDING}, {"src_mask": CAUSAL, "is_causal": True}):
        torch.testing.assert_close(ours(x, **call), theirs(x, **call), **CLOSE)


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_block_takes_batches_either_way_and_single_sequences(batch_first):
    ours = block("bn+sh", batch_first=batch_first)
    x = torch.randn(N, L, E, dtype=torch.float64)
    out = ours(x if batch_first else x.transpose(0, 1))
    out = out if batch_first else out.transpose(0, 1)
    for row in range(N):
        torch.testing.assert_close(ours(x[row]), out[row], **CLOSE)


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize("name", mechanisms())
def test_the_block_is_what_is_written_down(name, norm_first):
    ours = block(name, norm_first=norm_first).eval()
    x = torch.randn(N, L, E, dtype=torch.float64)
    expected = by_hand(ours, x, key_padding_mask=PADDING)
    for mode in MODES:
        torch.testing.assert_close(encode(ours, x, mode, src_key_padding_mask=PADDING), expected, **CLOSE)


def stack(layer: nn.TransformerEncoderLayer, nested: bool) -> nn.TransformerEncoder:
    if not nested:
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with pytest.warns(UserWarning, match="enable_nested_tensor is True, but self.use_nested_tensor is False because"):
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)


@pytest.mark.parametrize(
    ("training", "nested"),
    [(True, False), (False, False), (False, True)],
    ids=["train", "eval", "eval, nested asked for"],
)
@pytest.mark.parametrize("name", mechanisms())
def test_torchs_encoder_of_our_blocks_computes_the_mechanism_in_every_mode(name, training, nested):
    encoder = stack(block(LAYERS[name]), nested).train(training)
    x = torch.randn(N, L, E, dtype=torch.float64)
    softmax = nn.TransformerEncoder(torch_block(encoder.layers[0]), 2, enable_nested_tensor=False).train(training)
    for masks, call in (
        ({}, {}),
        ({"src_key_padding_mask": PADDING}, {"key_padding_mask": PADDING}),
        ({"src_key_padding_mask": PADDING.flip(1)}, {"key_padding_mask": PADDING.flip(1)}),
    ):
        expected = x
        for layer in encoder.layers:
            expected = by_hand(layer, expected, **call)
        for mode in MODES if not training else ["gradients"]:
            torch.testing.assert_close(encode(encoder, x, mode, **masks), expected.detach(), **CLOSE)
        if name != "softmax":
            assert (softmax(x, **masks) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", mechanisms())
def test_torchs_encoder_passes_a_causal_mask_on_as_causal(name, training):
    encoder = nn.TransformerEncoder(block(name), 2, enable_nested_tensor=False).train(training)
    x = torch.randn(N, L, E, dtype=torch.float64)
    if mechanism(name).causal_refusal(H):
        with pytest.raises(CausalFormError):
            encoder(x, mask=CAUSAL)
        return
    for masks in ({}, {"src_key_padding_mask": PADDING}):
        expected = x
        for layer in encoder.layers:
            padding = masks.get("src_key_padding_mask")
            expected = by_hand(layer, expected, is_causal=True, key_padding_mask=padding)
        for mode in MODES if not training else ["gradients"]:
            for hint in (None, True):
                out = encode(encoder, x, mode, mask=CAUSAL, is_causal=hint, **masks)
                torch.testing.assert_close(out, expected.detach(), **CLOSE)


@fused_path_warning
@nested_prototype
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested asked for", "not nested"])
@pytest.mark.parametrize("name", mechanisms())
def test_our_attention_inside_torchs_own_encoder_is_called_in_every_mode(name, nested, when):
    layer = torch_block()
    nn.init.normal_(layer.self_attn.in_proj_weight, std=0.5)
    if when == "before":
        encoder = nn.TransformerEncoder(with_ours(layer, name), 2, enable_nested_tensor=nested)
    else:
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        for own in encoder.layers:
            with_ours(own, name)
    x = torch.randn(N, L, E, dtype=torch.float64)
    for training in (True, False):
        encoder.train(training)
        for padding in (None, PADDING):
            expected = x
            for own in encoder.layers:
                expected = by_hand(own, expected, key_padding_mask=padding)
            kept = torch.ones(N, L, dtype=torch.bool) if padding is None else ~padding
            for mode in MODES if not training else ["gradients"]:
                out = encode(encoder, x, mode, src_key_padding_mask=padding)
                torch.testing.assert_close(out[kept], expected[kept].detach(), **CLOSE)


@pytest.mark.parametrize("name", NOT_SOFTMAX)
def test_our_attention_inside_torchs_own_layer_is_not_torchs(name):
    theirs = torch_block().eval()
    nn.init.normal_(theirs.self_attn.in_proj_weight, std=0.5)
    ours = with_ours(copy.deepcopy(theirs), LAYERS[name])
    x = torch.randn(N, L, E, dtype=torch.float64)
    with torch.no_grad():
        assert (ours(x) - theirs(x)).abs().max() > 1e-2 or mechanism(name).learned(H, E // H)


@nested_prototype
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", ["softmax", "bn", "bn+sh", "linear-sh", "qk-norm"])
def test_a_nested_tensor_gives_what_each_sequence_gives_alone(name, causal):
    layer = block(name).self_attn
    rows = [torch.randn(n, E, dtype=torch.float64) for n in (7, 1, 4)]
    nested = torch.nested.nested_tensor(rows)
    out, weights = layer(nested, nested, nested, need_weights=False, is_causal=causal)
    assert weights is None
    for row, found in zip(rows, out.unbind(), strict=True):
        torch.testing.assert_close(found, layer(row, row, row, need_weights=False, is_causal=causal)[0], **CLOSE)


@nested_prototype
def test_nested_queries_attend_to_nested_keys_of_other_lengths():
    layer = block("conv1d").self_attn
    rows, others = ([torch.randn(n, E, dtype=torch.float64) for n in lengths] for lengths in ((3, 5), (4, 2)))
    queries, keys = (torch.nested.nested_tensor(given) for given in (rows, others))
    out, _ = layer(queries, keys, keys)
    for row, other, found in zip(rows, others, out.unbind(), strict=True):
        torch.testing.assert_close(found, layer(row, other, other, need_weights=False)[0], **CLOSE)
    with pytest.raises(ValueError, match="must all be nested tensors, or none"):
        layer(queries, others[0][None], others[0][None])


@nested_prototype
def test_our_block_behind_one_of_torchs_takes_the_nested_tensor_that_torch_made():
    encoder = nn.TransformerEncoder(torch_block(), 2).eval()
    encoder.layers[1] = block("bn").eval()
    x = torch.randn(N, L, E, dtype=torch.float64)
    expected = by_hand(encoder.layers[1], encoder.layers[0](x, src_key_padding_mask=PADDING), key_padding_mask=PADDING)
    with torch.no_grad():
        out = encoder(x, src_key_padding_mask=PADDING)
    torch.testing.assert_close(out[~PADDING], expected[~PADDING].detach(), **CLOSE)


@nested_prototype
def test_the_paths_above_are_the_ones_that_torch_takes():
    """A float mask and is_causal beside a causal one; nested tensors where our attention came after the encoder."""
    seen = []

    class Spy(MultiheadAttention):
        def forward(self, query, *args, key_padding_mask=None, is_causal=False, **call):
            seen.append((query.is_nested, None if key_padding_mask is None else key_padding_mask.dtype, is_causal))
            call |= {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
            return super().forward(query, *args, **call)

    x = torch.randn(N, L, E, dtype=torch.float64)
    encoder = nn.TransformerEncoder(torch_block(), 1).eval()
    with_ours(encoder.layers[0], "bn").self_attn.__class__ = Spy
    with torch.no_grad():
        encoder(x, src_key_padding_mask=PADDING)
        encoder(x, mask=CAUSAL, src_key_padding_mask=PADDING)
    encoder(x, src_key_padding_mask=PADDING)
    padded = (False, torch.bool, False)  # what our attention makes of a nested tensor
    assert seen == [(True, None, False), padded, (False, torch.float64, True), (False, torch.float64, False)]


def test_our_attention_serves_in_torchs_decoder():
    theirs = nn.TransformerDecoderLayer(E, H, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    for part in ("self_attn", "multihead_attn"):
        attention = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
        attention.load_state_dict(getattr(theirs, part).state_dict())
        setattr(ours, part, attention)
    x, memory = torch.randn(N, L, E, dtype=torch.float64), torch.randn(N, 6, E, dtype=torch.float64)
    masks = {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_key_padding_mask": PADDING[:, 2:8]}
    for training in (True, False):
        for mode in MODES.values():
            with mode():
                out, expected = (layer.train(training)(x, memory, **masks) for layer in (ours, theirs))
                torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear", "sparse-bn", "conv1d", "learnable beta, apart scales"])
def test_a_block_survives_copying_pickling_and_its_state_dict(name):
    primal = LAYERS[name]
    ours, fresh = block(primal).eval(), block(primal).eval()
    fresh.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(N, L, E, dtype=torch.float64)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), fresh):
        assert torch.equal(other(x), ours(x))


def test_a_torch_blocks_state_dict_loads():
    theirs = nn.TransformerEncoderLayer(E, H)
    for name in ("softmax", "bn+sh", "linear", "sparse"):
        TransformerEncoderLayer(E, H, mechanism=name).load_state_dict(theirs.state_dict(), strict=True)


def test_a_block_trains():
    ours = block(LAYERS["learnable beta, apart scales"], dropout=0.1)
    encoder = nn.TransformerEncoder(ours, 2, enable_nested_tensor=False)
    x = torch.randn(N, L, E, dtype=torch.float64)
    encoder(x, src_key_padding_mask=PADDING).square().mean().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert (encoder.layers[0].self_attn.learned["beta"].grad != 0).all()


def test_dropout_acts_on_weights_and_branches_in_training_alone():
    ours = block("bn", dropout=0.5)
    x = torch.randn(N, L, E, dtype=torch.float64)
    assert ours.self_attn.dropout == 0.5
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))


def test_a_block_compiles_into_one_graph():
    torch._dynamo.reset()
    ours, x = block("bn+sh"), torch.randn(N, L, E, dtype=torch.float64)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(x, src_key_padding_mask=PADDING), ours(x, src_key_padding_mask=PADDING), **CLOSE
    )


def test_the_constructor_takes_what_torchs_takes_in_the_same_order_with_the_same_defaults():
    theirs, ours = (inspect.signature(c).parameters for c in (nn.TransformerEncoderLayer, TransformerEncoderLayer))
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    forwards = [inspect.signature(c.forward).parameters for c in (nn.TransformerEncoderLayer, TransformerEncoderLayer)]
    assert [(p.name, p.default) for p in forwards[0].values()] == [(p.name, p.default) for p in forwards[1].values()]


def test_a_residual_of_the_primal_is_refused_since_the_block_has_one():
    with pytest.raises(ValueError, match="the encoder layer adds the residual itself"):
        TransformerEncoderLayer(E, H, mechanism=Primal(residual=True))


def test_heads_that_do_not_divide_are_an_error_that_says_what_was_given():
    with pytest.raises(ValueError, match="multiple of nhead, got d_model=10, nhead=4"):
        TransformerEncoderLayer(10, 4, mechanism="bn")
