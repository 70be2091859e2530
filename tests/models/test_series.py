"""The time-series transformers are those of the reference code bases, with any mechanism."""

import math
import warnings
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from primaldual import MultiheadAttention, mechanism, mechanisms
from primaldual.models import SeriesConfig, SeriesTransformer, build

BATCH, LENGTH, CHANNELS, CLASSES = 5, 16, 3, 4
LENGTHS = torch.tensor([16, 9, 3, 12, 1])
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]
BOTH = pytest.mark.parametrize("encoder", ["mvts", "flowformer"])


def config(encoder: str = "mvts", **settings) -> SeriesConfig:
    small = {"d_model": 16, "layers": 2, "feedforward": 24, "dropout": 0.0} | settings
    return SeriesConfig(channels=CHANNELS, length=LENGTH, outputs=CLASSES, encoder=encoder, **small)


def series() -> Tensor:
    return torch.randn(BATCH, LENGTH, CHANNELS, dtype=torch.float64)


@BOTH
@pytest.mark.parametrize("name", mechanisms())
def test_every_mechanism_runs_and_every_parameter_gets_a_gradient(encoder, name):
    model = build(config(encoder, mechanism=name, dropout=0.1), seed=0)
    assert model(series().float(), PADDING).isfinite().all()
    y = model.eval()(series().float(), PADDING)  # in training a batch norm cancels the biases before it
    assert y.shape == (BATCH, CLASSES)
    y.square().sum().backward()
    still = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert not still


def test_regression_gives_one_number_per_series():
    model = build(
        SeriesConfig(channels=CHANNELS, length=LENGTH, outputs=1, task="regression", d_model=16, layers=1), seed=0
    )
    assert model(series().float(), PADDING).shape == (BATCH,)


def torch_mvts(model: SeriesTransformer, x: Tensor, padding: Tensor) -> Tensor:
    """mvts_transformer's classifier, of torch's own layers with the weights of `model`."""
    c = model.config
    x = nn.functional.linear(x, model.embedding.weight, model.embedding.bias) * math.sqrt(c.d_model) + model.positions
    for block in model.layers:
        layer = nn.TransformerEncoderLayer(c.d_model, c.heads, c.feedforward, 0.0, "gelu", batch_first=True).double()
        norms = [nn.BatchNorm1d(c.d_model, eps=1e-5).double() for _ in range(2)]
        for norm, mine in zip(norms, (block.norm1, block.norm2), strict=True):
            norm.load_state_dict(mine.state_dict())
            norm.train(model.training)
        state = {n: p for n, p in block.state_dict().items() if not n.startswith("norm")}
        layer.load_state_dict(state, strict=False)
        attended = layer.self_attn(x, x, x, key_padding_mask=padding)[0]
        x = norms[0]((x + attended).transpose(1, 2)).transpose(1, 2)
        fed = layer.linear2(nn.functional.gelu(layer.linear1(x)))
        x = norms[1]((x + fed).transpose(1, 2)).transpose(1, 2)
    x = nn.functional.gelu(x) * ~padding.unsqueeze(-1)
    return model.head(x.reshape(len(x), -1))


def torch_flowformer(model: SeriesTransformer, x: Tensor, padding: Tensor) -> Tensor:
    """Flowformer's classifier with softmax attention, of torch's own layers with the weights of `model`."""
    c = model.config
    x = nn.functional.linear(x, model.embedding.weight, model.embedding.bias) * math.sqrt(c.d_model) + model.positions
    for block in model.layers:
        layer = nn.TransformerEncoderLayer(c.d_model, c.heads, c.feedforward, 0.0, "gelu", batch_first=True).double()
        layer.load_state_dict(block.state_dict())
        x = layer(x)
    x = nn.functional.gelu(nn.functional.layer_norm(x, (c.d_model,), model.norm.weight, model.norm.bias))
    return model.head((x * ~padding.unsqueeze(-1)).reshape(len(x), -1))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("encoder", "oracle"), [("mvts", torch_mvts), ("flowformer", torch_flowformer)])
def test_softmax_equals_the_composition_of_torchs_layers(encoder, oracle, training):
    model = build(config(encoder), seed=3).double()
    model(series(), PADDING)  # running statistics that are not those of the start
    model.train(training)
    x = series().masked_fill(PADDING.unsqueeze(-1), 0.0)
    expected = oracle(deepcopy(model), x, PADDING)
    torch.testing.assert_close(model(x, PADDING), expected, rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("name", ["softmax", "bn+sh", "conv1d", "linear-bn", "sparse"])
def test_what_stands_at_padded_steps_does_not_matter(encoder, name):
    model = build(config(encoder, mechanism=name), seed=0).double()
    x = series()
    other = x.masked_fill(PADDING.unsqueeze(-1), 1e3)
    for _ in (model.train(), model.eval()):
        torch.testing.assert_close(model(x, PADDING), model(other, PADDING), rtol=0, atol=0)
    assert not torch.allclose(model(x), model(other))


def test_only_mvts_hides_padding_from_attention():
    outputs = {}
    for encoder in ("mvts", "flowformer"):
        model = build(config(encoder), seed=0).double().eval()
        x = series().masked_fill(PADDING.unsqueeze(-1), 0.0)
        outputs[encoder] = torch.allclose(model.encode(x, PADDING), model.encode(x))
    assert outputs == {"mvts": False, "flowformer": True}


# embedding C·d + d; positions T·d; a block 4(d² + d) + 2·d·f + f + d + 2·2d; a final norm 2d; head T·d·k + k
COUNTS = {
    "JapaneseVowels": (
        SeriesConfig(channels=12, length=26, outputs=9, d_model=128),
        1_664 + 3_328 + 3 * 132_480 + 29_961,
    ),
    "EthanolConcentration": (
        SeriesConfig(channels=3, length=1751, outputs=4, layers=1),
        256 + 112_064 + 49_984 + 448_260,
    ),
    "PEMS-SF": (
        SeriesConfig("flowformer", 512, layers=2, feedforward=2048, channels=963, length=144, outputs=7),
        493_568 + 73_728 + 2 * 3_152_384 + 1_024 + 516_103,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_as_many_as_the_description_says(name):
    settings, expected = COUNTS[name]
    with torch.device("meta"):
        model = SeriesTransformer(settings)
    assert sum(p.numel() for p in model.parameters()) == expected


def test_mvts_blocks_start_alike_and_flowformers_apart():
    mvts, flow = (build(config(encoder), seed=0).layers for encoder in ("mvts", "flowformer"))
    assert all(torch.equal(a, b) for a, b in zip(mvts[0].parameters(), mvts[1].parameters(), strict=True))
    assert mvts[0].linear1.weight is not mvts[1].linear1.weight
    assert not torch.equal(flow[0].linear1.weight, flow[1].linear1.weight)


def test_initial_weights_are_drawn_as_the_code_bases_draw_them():
    wide = {"d_model": 64, "layers": 1}
    model = build(config(**wide), seed=0)
    assert 0.019 < model.positions.abs().max() <= 0.02
    attention = model.layers[0].self_attn
    bound = math.sqrt(6 / (4 * 64))  # torch's attention: Xavier over the three projections at once, no bias
    assert 0.98 * bound < attention.in_proj_weight.abs().max() <= bound and not attention.in_proj_bias.any()
    attention = build(config("flowformer", **wide), seed=0).layers[0].self_attn
    for parameter in (attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight):
        assert 0.95 / 8 < parameter.abs().max() <= 1 / 8  # plain linear layers: ±1/√d
    assert attention.out_proj.bias.any()


@BOTH
def test_a_seed_gives_the_same_weights_whatever_was_drawn_before(encoder):
    first = build(config(encoder), seed=7)
    state = torch.get_rng_state()
    torch.randn(3)
    again, other = build(config(encoder, mechanism="bn"), seed=7), build(config(encoder), seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)
    torch.set_rng_state(state)
    build(config(encoder), seed=9)
    assert torch.equal(torch.get_rng_state(), state)


@BOTH
def test_the_state_dict_and_the_settings_restore_a_model(encoder):
    model = build(config(encoder, mechanism=mechanism("bn+sh", beta=0.6)), seed=0).double()
    model(series())
    copy = SeriesTransformer(SeriesConfig.from_dict(model.config.to_dict())).double()
    copy.load_state_dict(model.state_dict())
    x = series()
    assert torch.equal(copy.eval()(x, PADDING), model.eval()(x, PADDING))


def test_dropout_acts_in_training_in_every_place():
    model = build(config(dropout=0.5), seed=0).double()
    x = series()
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    dropouts = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert dropouts == [0.5] * (1 + 3 * 2)
    assert {m.dropout for m in model.modules() if isinstance(m, MultiheadAttention)} == {0.5}
    own = build(config(dropout=0.5, attention_dropout=0.0), seed=0)
    assert {m.dropout for m in own.modules() if isinstance(m, MultiheadAttention)} == {0.0}


@BOTH
@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear", "sparse-bn"])
def test_stacked_members_train_as_each_would_alone(encoder, name):
    models = [build(config(encoder, mechanism=name), seed).double() for seed in range(3)]
    parameters, buffers = stack_module_state(models)
    base, x, y = deepcopy(models[0]), torch.stack([series() for _ in models]), torch.randint(CLASSES, (3, BATCH))

    def loss(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(base, (p, b), (x, PADDING)), y)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        torch.vmap(loss)(parameters, buffers, x, y).sum().backward()
    for i, model in enumerate(models):
        nn.functional.cross_entropy(model(x[i], PADDING), y[i]).backward()
        for n, p in model.named_parameters():
            torch.testing.assert_close(parameters[n].grad[i], p.grad, rtol=0, atol=1e-12)
        for n, b in model.named_buffers():
            torch.testing.assert_close(buffers[n][i], b, rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("name", mechanisms())
def test_no_step_waits_for_a_value(encoder, name):
    model = build(config(encoder, mechanism=name, dropout=0.1), seed=0).to("meta")  # which has shapes and no values
    y = model(series().float().to("meta"), PADDING.to("meta"))
    y.sum().backward()
    assert y.shape == (BATCH, CLASSES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "bert"}, "encoder must be one of mvts, flowformer; got 'bert'"),
        ({"heads": 3}, "multiple of heads, got d_model=16, heads=3"),
        ({"task": "regression"}, "1 output, got outputs=4"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"layers": 0}, "layers must be an integer of at least 1"),
        ({"mechanism": "magic"}, "unknown mechanism 'magic'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_inputs_of_another_shape_are_refused():
    model = build(config(), seed=0)
    with pytest.raises(ValueError, match=r"\[batch, 16, 3\], got \[2, 15, 3\]"):
        model(torch.randn(2, 15, 3))
    with pytest.raises(ValueError, match="padding must be boolean"):
        model(torch.randn(2, 16, 3), torch.zeros(2, 16))
