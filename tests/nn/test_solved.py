"""The layer that solves for its dual variables."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from primaldual import MultiheadAttention, Primal, mechanism
from primaldual.nn.solved import SolvedAttention
from primaldual.primal import Exponential, Unit
from primaldual.regression import PerQueryError, fit
from primaldual.svr.design import design
from primaldual.svr.implicit import values_of

E, H, B, L = 8, 2, 2, 6
LOSSES = ["epsilon-insensitive", "squared"]
PADDING = torch.arange(L) >= torch.tensor([[L], [4]])
MECHANISMS = {
    "softmax": "softmax",
    "bn": mechanism("bn", learnable=True),
    "full bn": mechanism("bn", full=True),
    "sh": "sh",
    "linear": "linear",
    "linear-bn+sh": mechanism("linear-bn+sh", learnable=True),
    "qk-norm": "qk-norm",
    "conv1d": mechanism("conv1d", size=3),
    "conv1d of each channel": mechanism("conv1d", size=3, channels="each"),
    "rotary, tempered": mechanism("qk-norm", temperature=True, rotary=True),
    "alibi+sh": "alibi+sh",
    "conv pooled": mechanism("sh", how="conv"),
    "unit": Primal(Exponential(), Unit()),
    "bias, residual": Primal(bias=True, residual=True),
}

each_loss = pytest.mark.parametrize("loss", LOSSES)
each_mechanism = pytest.mark.parametrize("primal", MECHANISMS.values(), ids=MECHANISMS)


def make(loss: str, primal: Primal | str = "softmax", **options) -> SolvedAttention:
    """A layer of random parameters, in whose regressions zero, free and bounded points occur."""
    given = {"C": 1.0, "epsilon": 0.3, "dtype": torch.float64} | options
    layer = SolvedAttention(E, H, loss=loss, mechanism=primal, **given)
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, mean=0.5 if name.startswith("learned") else 0.0, std=0.5)
    return layer


def inputs(length: int = L, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, length, E, dtype=dtype)


def projected(layer: SolvedAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(layer.split(t) for t in layer.project(x, x, x, None, None))


def heads_of(layer: SolvedAttention, x: Tensor, padding: Tensor | None = None) -> Tensor:
    """What the heads give, before the output projection."""
    return layer._attend(layer.state(x, x, x, padding, need_weights=False))[0]


@each_loss
@each_mechanism
def test_gradients(loss, primal):
    layer, x = make(loss, primal), inputs().requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        arguments = (x, x, x, PADDING, False)
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), arguments)[0]

    assert gradcheck(run, (x, *parameters), fast_mode=True)


def test_every_state_occurs_in_the_regressions_of_these_tests():
    layer, x = make("epsilon-insensitive"), inputs()
    _, keys, targets = projected(layer, x)
    beta = layer.solve(design(layer.primal, keys, targets, None, None, False, {})).abs()
    assert (beta == 0).any() and (beta == layer.C).any() and ((beta > 0) & (beta < layer.C)).any()


@each_mechanism
def test_epsilon_insensitive_output_is_the_prediction_of_a_fit(primal):
    layer, x = make("epsilon-insensitive", primal), inputs()
    parameters = dict(layer.learned.items())
    with torch.no_grad():
        queries, keys, targets = projected(layer, x)
        scale = design(layer.primal, keys, targets, PADDING, None, False, parameters).log_scale
        given = {"C": layer.C * (-scale).exp(), "epsilon": layer.epsilon, "key_padding_mask": PADDING}
        solved = fit(layer.primal, keys, targets, **given, parameters=parameters, tol=1e-12)
        if layer.primal.mixing_maps:
            queries = queries.masked_fill(PADDING[:, None, :, None], 0.0)
        heads = heads_of(layer, x, PADDING)
        torch.testing.assert_close(heads, solved.predict(queries), rtol=1e-6, atol=1e-6)


def test_squared_loss_is_kernel_ridge_regression_written_by_hand():
    layer, x = make("squared", C=5.0), inputs()
    q, k, y = projected(layer, x)
    kappa = (k @ k.transpose(-1, -2) / (E / H) ** 0.5).exp()
    h = kappa.sum(-1, keepdim=True)
    K = kappa / (h * h.transpose(-1, -2))
    largest = K.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    beta = torch.linalg.solve(K + largest / 5.0 * torch.eye(L, dtype=torch.float64), y)
    weights = (q @ k.transpose(-1, -2) / (E / H) ** 0.5).softmax(-1)
    expected = layer.out_proj((weights @ (beta / h)).transpose(1, 2).flatten(2))
    output, given = layer(x, x, x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(given, weights.mean(1))


@each_loss
@each_mechanism
def test_padding_takes_no_part(loss, primal):
    layer, x = make(loss, primal), inputs()
    padded = x.masked_fill(PADDING.unsqueeze(-1), 7.0)
    output, _ = layer(padded, padded, padded, PADDING, need_weights=False)
    as_float = torch.zeros(B, L, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
    again, _ = layer(padded, padded, padded, as_float, need_weights=False)
    torch.testing.assert_close(again, output, rtol=0, atol=0)
    short, _ = layer(x[1:, :4], x[1:, :4], x[1:, :4], need_weights=False)
    torch.testing.assert_close(output[1:, :4], short, rtol=1e-7, atol=1e-7)


@each_loss
@pytest.mark.parametrize("primal", ["softmax", "sh", "linear"])
def test_a_sequence_of_padding_alone_gives_zeros_and_no_nan(loss, primal):
    layer, x = make(loss, primal), inputs().requires_grad_()
    hidden = torch.tensor([[False], [True]]).expand(B, L)
    heads = heads_of(layer, x, hidden)
    assert not heads[1].any() and heads[0].all()
    for gradient in torch.autograd.grad(heads.square().sum(), (x, layer.in_proj_weight)):
        assert gradient.isfinite().all()
    output, weights = layer(x, x[:, :0], x[:, :0])
    torch.testing.assert_close(output, layer.out_proj.bias.expand_as(output))
    assert weights.shape == (B, L, 0)


@each_loss
@pytest.mark.parametrize("primal", ["softmax", "bn+sh", "linear"])
def test_an_empty_batch_has_an_empty_output_and_gradients_of_zero(loss, primal):
    layer, x = make(loss, primal), inputs()[:0].requires_grad_()
    output, weights = layer(x, x, x)
    assert output.shape == (0, L, layer.embed_dim) and weights.shape == (0, L, L)
    output.sum().backward()
    assert not layer.in_proj_weight.grad.any()


@each_loss
def test_a_large_price_interpolates_the_targets(loss):
    layer = make(loss, "qk-norm", projection="shared", C=1e7, epsilon=0.0)  # queries are keys
    nn.init.constant_(layer.learned["gain"], 2.0)  # keys of one length, far apart: a well-conditioned kernel
    x = inputs(4)
    heads = heads_of(layer, x)
    torch.testing.assert_close(heads, projected(layer, x)[2], rtol=1e-4, atol=1e-4)


def test_a_wide_tube_gives_zeros():
    layer, x = make("epsilon-insensitive", epsilon=1e3), inputs()
    assert not heads_of(layer, x).any()


@each_loss
def test_a_small_price_shrinks_the_output(loss):
    x = inputs()
    sizes = [heads_of(make(loss, C=c), x).abs().max() for c in (1e-6, 1.0)]
    assert sizes[0] < 1e-4 < sizes[1]


@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "linear"])
def test_weights_are_those_of_attention_and_give_the_output_with_the_solved_values(name):
    layer, x = make("squared", name), inputs()
    learned = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, mechanism=name)
    learned.load_state_dict(layer.state_dict())
    output, weights = layer(x, x, x, PADDING, average_attn_weights=False)
    other, expected = learned(x, x, x, PADDING, average_attn_weights=False)
    torch.testing.assert_close(weights, expected)
    assert not torch.allclose(output, other)  # here values are a function of the whole sequence
    _, keys, targets = projected(layer, x)
    made = design(layer.primal, keys, targets, PADDING, None, False, {})
    heads = heads_of(layer, x, PADDING)
    values = values_of(made, layer.solve(made))
    scales = layer.primal.training_set.head_scales(H)
    for h, s in enumerate(scales):
        per_token = values[:, h].repeat_interleave(s, dim=1)[:, :L]
        torch.testing.assert_close(heads[:, h], weights[:, h] @ per_token)


@each_loss
def test_it_trains(loss):
    layer = SolvedAttention(E, H, loss=loss, C=10.0, epsilon=0.05)
    x, wanted = inputs(10, torch.float32), inputs(10, torch.float32)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        error = (layer(x, x, x, need_weights=False)[0] - wanted).square().mean()
        error.backward()
        optimizer.step()
        losses.append(error.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@each_loss
def test_float32_input_is_solved_in_float64(loss):
    layer, x = make(loss), inputs()
    single = copy.deepcopy(layer).float()
    output, weights = single(x.float(), x.float(), x.float())
    assert output.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(output.double(), layer(x, x, x)[0], rtol=1e-4, atol=1e-4)


@each_loss
def test_state_dict_and_deepcopy_and_layouts(loss):
    layer, x = make(loss, "bn"), inputs()
    output, _ = layer(x, x, x)
    other = make(loss, "bn", batch_first=False)
    other.load_state_dict(layer.state_dict())
    for twin, arguments in ((copy.deepcopy(layer), x), (other, x.transpose(0, 1))):
        again, _ = twin(arguments, arguments, arguments)
        torch.testing.assert_close(again if twin.batch_first else again.transpose(0, 1), output)
    torch.testing.assert_close(layer(x[0], x[0], x[0])[0], output[0])
    loaded = nn.MultiheadAttention(E, H, dtype=torch.float64).state_dict()
    layer.load_state_dict(loaded)
    assert f"loss={loss!r}" in repr(layer)


@each_loss
@pytest.mark.parametrize("primal", ["softmax", "linear"])
def test_dropout_acts_in_training_alone(loss, primal):
    layer, x = make(loss, primal, dropout=0.5), inputs()
    dropped, kept = layer(x, x, x)[0], layer.eval()(x, x, x)[0]
    assert not torch.allclose(dropped, kept)
    layer.dropout = 0.0
    torch.testing.assert_close(layer(x, x, x)[0], kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "loss must be one of 'epsilon-insensitive', 'squared'; got 'hinge'"),
        ({"C": 0.0}, "C must be a positive finite number, got 0.0"),
        ({"C": float("inf")}, "C must be a positive finite number, got inf"),
        ({"C": "1"}, "C must be a positive finite number, got '1'"),
        ({"epsilon": -0.1}, "epsilon must be a finite number of at least 0, got -0.1"),
        ({"max_iter": 0}, "max_iter must be an integer of at least 1, got 0"),
        ({"mechanism": "sparse"}, "a regression per query"),
        ({"mechanism": "sparse-sh"}, "a regression per query"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SolvedAttention(E, H, **options)


def test_what_would_be_a_regression_per_query_is_refused():
    layer, x = make("squared"), inputs()
    with pytest.raises(PerQueryError, match="is_causal=True gives each query a training set of its own"):
        layer(x, x, x, is_causal=True)
    with pytest.raises(PerQueryError, match="attn_mask gives each query a training set of its own"):
        layer(x, x, x, attn_mask=torch.zeros(L, L))
    with pytest.raises(ValueError, match="must be 0 or −inf"):
        layer(x, x, x, key_padding_mask=torch.ones(B, L, dtype=torch.float64))
    with pytest.raises(ValueError, match="conv pooling has no weights"):
        make("squared", mechanism("sh", how="conv"))(x, x, x)


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_only_the_projections_are_rounded(loss: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)  # of heads whose first steps the solver takes in float32, which autocast would round
    layer, x = make(loss, dtype=torch.float32), inputs(dtype=torch.float32).requires_grad_()
    exact, weights = layer(x, x, x)
    with torch.autocast("cpu", dtype):
        rough, rough_weights = layer(x, x, x)
    assert rough.dtype == dtype
    rough.float().square().sum().backward()
    assert x.grad.isfinite().all()
    # the projections' roundings, which the solution may magnify by its condition, C = 1
    assert (rough.float() - exact).norm() < 8 * torch.finfo(dtype).eps * exact.norm()
    assert (rough_weights.float() - weights).abs().max() < 8 * torch.finfo(dtype).eps


def test_windows_count_from_the_first_token_of_a_left_padded_row():
    layer, x = make("squared", "sh"), inputs(9)
    hidden = torch.arange(9) < torch.tensor([[3], [0]])
    output, weights = layer(x, x, x, key_padding_mask=hidden)
    expected, of_tokens = layer(*(x[:1, 3:],) * 3)
    torch.testing.assert_close(output[:1, 3:], expected)
    torch.testing.assert_close(weights[:1, 3:, 3:], of_tokens)
