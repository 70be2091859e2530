"""A layer is a torch module: it is copied, saved, cast, compiled, trained and evaluated like any other."""

import copy
import io
import pickle

import pytest
import torch

from nn.layers import LAYERS, MASKS, E, H, L, N, each, make
from primaldual import MultiheadAttention, Primal, TransformerEncoderLayer, mechanism
from primaldual.nn import SolvedAttention
from primaldual.primal import RandomFeatures, Recenter

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@each()
def test_a_layer_survives_copying_pickling_saving_and_its_state_dict(primal):
    layer, x = make(primal), torch.randn(N, L, E, dtype=torch.float64)
    expected = layer(x, x, x, need_weights=False)[0]
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    fresh = make(primal)
    fresh.load_state_dict(layer.state_dict(), strict=True)
    for name, other in {
        "deepcopy": copy.deepcopy(layer),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "torch.save": torch.load(file, weights_only=False),
        "state dict": fresh,
    }.items():
        assert torch.equal(other(x, x, x, need_weights=False)[0], expected), name
        assert other.primal == primal


def test_random_features_travel_in_the_state_dict():
    ours, other = (make(mechanism("linear", features=RandomFeatures(12, seed))) for seed in (0, 1))
    x = torch.randn(N, L, E, dtype=torch.float64)
    assert "feature_projection" in ours.state_dict()
    other.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(other(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])


@each()
def test_everything_a_layer_holds_follows_it_to_another_dtype(primal):
    layer = MultiheadAttention(E, H, batch_first=True, mechanism=primal)
    x = torch.randn(N, L, E)
    single = layer(x, x, x, need_weights=False)[0]
    layer.to(torch.float64)
    assert {t.dtype for t in layer.state_dict().values()} == {torch.float64}
    double = layer(x.double(), x.double(), x.double(), need_weights=False)[0]
    assert double.dtype == torch.float64
    # both hold the same numbers; what differs is rounding in float32
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


@each()
def test_autocast_to_bfloat16_stays_close(primal):
    layer, x = MultiheadAttention(E, H, batch_first=True, mechanism=primal), torch.randn(N, L, E)
    padding = MASKS["bool padding"]
    exact = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    rough.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    # a chain of about eight roundings to 8 bits
    assert (rough.float() - exact).norm() < 8 * 2**-8 * exact.norm()


@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear", "linear-bn", "sparse", "conv1d", "qk-norm"])
def test_dropout_acts_in_training_and_not_in_evaluation(name):
    layer, x = make(name, dropout=0.5), torch.randn(N, L, E, dtype=torch.float64)
    for needed in (True, False):
        first, second = (layer.train()(x, x, x, need_weights=needed)[0] for _ in range(2))
        assert not torch.equal(first, second)
        first, second = (layer.eval()(x, x, x, need_weights=needed)[0] for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["softmax", "linear-bn", "sparse", "learnable beta, apart scales"])
def test_the_layer_compiles_into_one_graph(name):
    torch._dynamo.reset()
    layer, x = make(LAYERS[name]), torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    padding = MASKS["bool padding"]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    out = compiled(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    expected = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(out, expected, **CLOSE)
    found, wanted = (torch.autograd.grad(o.square().sum(), [x, *layer.parameters()]) for o in (out, expected))
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_printed_layer_says_its_mechanism_heads_and_sizes():
    layer = MultiheadAttention(16, 4, mechanism="bn+sh", batch_first=True, kdim=8, vdim=8, dropout=0.1, impl="dense")
    said = "embed_dim=16, num_heads=4, mechanism='bn+sh', kdim=8, vdim=8, dropout=0.1, impl='dense', batch_first=True"
    assert said in repr(layer)
    own = Primal(inputs=(Recenter(0.5),), bias=True)
    assert f"mechanism=Primal(inputs=({Recenter(0.5)!r},), bias=True)" in repr(MultiheadAttention(16, 4, mechanism=own))
    assert "embed_dim=16, num_heads=4, mechanism='sh', batch_first=True, loss=" in repr(
        SolvedAttention(16, 4, mechanism="sh")
    )
    block = repr(TransformerEncoderLayer(16, 4, 32, mechanism="linear"))
    assert "d_model=16, nhead=4, mechanism='linear', dim_feedforward=32, norm_first=False" in block
    assert "embed_dim=16, num_heads=4, mechanism='linear'" in block
