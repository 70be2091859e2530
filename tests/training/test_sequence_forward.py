"""Members of long sequences at once: each is its own model, and the kernels are the formulas."""

import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from primaldual.models import SequenceClassifier, SequenceConfig
from primaldual.primal import mechanism
from primaldual.training.sequence_forward import forward
from primaldual.training.stacked import Stacked
from support.interpreter import ON_CPU, child_process

# numpy's, in the interpreter: hashes wrap around, and what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)
DEVICES = ["cpu"] if ON_CPU else [pytest.param("cuda", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize("device", DEVICES)

test_the_kernels_in_the_interpreter = child_process(__file__)


def config(name: str, **changes) -> SequenceConfig:
    options = {"learnable": True} if name == "bn+sh" else {}
    sizes = {"d_model": 16, "heads": 2, "layers": 2, "feedforward": 24, "vocabulary": 11, "dropout": 0.0}
    return SequenceConfig(**sizes | {"length": 24, "outputs": 3, "mechanism": mechanism(name, **options)} | changes)


def models(of: SequenceConfig) -> list[SequenceClassifier]:
    found = []
    for seed in (3, 4, 5):
        torch.manual_seed(seed)
        model = SequenceClassifier(of)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        found.append(model)
    return found


def batch(pairs: bool, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (3, 4, 2) if pairs else (3, 4)
    tokens = torch.randint(1, 11, (*shape, 20), device=device)
    padding = torch.arange(20, device=device) >= torch.randint(3, 21, (*shape, 1), device=device)
    return tokens.masked_fill(padding, 0), padding, torch.randint(3, (3, 4), device=device)


@pytest.mark.skipif(ON_CPU, reason="in the interpreter kernels take the place of torch's operators")
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("pairs", [False, True], ids=["single", "pairs"])
@pytest.mark.parametrize("name", ["softmax", "bn", "bn+sh", "conv1d", "linear-bn", "sparse-sh"])
def test_members_at_once_are_models_one_by_one(name, pairs, padded):
    of = config(name, pairs=pairs)
    alone = [model.double().train() for model in models(of)]
    weights = Stacked(alone, torch.device("cpu"), torch.float64, torch.float64)
    tokens, padding, y = batch(pairs)
    hidden = padding if padded else None
    scores = forward(of, weights, tokens, hidden, True)
    weights.gather(cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum"))
    gradients = dict(weights.named(weights.matrix.grad))
    for i, model in enumerate(alone):
        expected = model(tokens[i], None if hidden is None else hidden[i])
        torch.testing.assert_close(scores[i], expected, rtol=1e-9, atol=1e-10)
        cross_entropy(expected, y[i], reduction="sum").backward()
        for parameter, p in model.named_parameters():
            torch.testing.assert_close(gradients[parameter][i], p.grad, rtol=1e-8, atol=1e-10, msg=parameter)


@everywhere
@pytest.mark.parametrize(("name", "pairs"), [("softmax", True), ("sh", False)])
def test_scores_and_gradients_by_kernels_are_those_of_the_formulas(name, pairs, device):
    of = config(name, pairs=pairs)
    where = torch.device(device)
    ours = Stacked(models(of), where, torch.float32, torch.float32, ("norm",))
    truth = Stacked(models(of), where, torch.float64, torch.float64)
    assert ours.fused and not truth.fused
    tokens, padding, y = batch(pairs, device)
    for training in (True, False):
        scores, expected = (forward(of, one, tokens, padding, training) for one in (ours, truth))
        torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-5)
        if training:
            for one, found in ((ours, scores), (truth, expected)):
                one.gather(cross_entropy(found.flatten(0, 1), y.flatten(), reduction="sum"))
    found, wanted = dict(ours.named(ours.matrix.grad)), dict(truth.named(truth.matrix.grad))
    for parameter, gradient in wanted.items():
        budget = 1e-4 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found[parameter].double(), gradient, rtol=0, atol=budget, msg=parameter)


@everywhere
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_sum_beside_a_norm_has_a_gradient_of_its_own(p, device):
    encoder = pytest.importorskip("primaldual.kernels.encoder")
    torch.manual_seed(0)
    shape = (2, 37, 16)
    x, a, residual = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    eye = torch.eye(16, device=device).expand(2, -1, -1).contiguous()
    weight, bias = torch.rand(2, 16, device=device) + 0.5, torch.randn(2, 16, device=device)
    zero = torch.zeros(2, 16, device=device)
    seed = torch.tensor([7], dtype=torch.int32, device=device)
    drop = encoder.Dropout(p, seed) if p else None
    norm = encoder.Norm(weight, bias, None, None)
    up = [torch.randn(shape, device=device) for _ in range(2)]

    def checked(y, r, inputs, branch):
        kept = (r - inputs[0]).detach() != 0 if p else torch.ones_like(r)
        sums = inputs[0] + branch * kept / (1 - p)
        expected = layer_norm(sums, (16,)) * weight.unsqueeze(1) + bias.unsqueeze(1), sums
        for one, other in zip((y, r), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        found, wanted = (
            torch.autograd.grad(sum((z * u).sum() for z, u in zip(both, up, strict=True)), inputs, retain_graph=True)
            for both in ((y, r), expected)
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)

    checked(*encoder.add_norm_beside(x, a, eye, zero, norm, drop, True), (x, a), a)
    hidden = torch.nn.functional.gelu(a)
    found = encoder.feed_forward_beside(a, residual, eye, zero, eye, zero, norm, (None, drop), True)
    checked(*found, (residual, a), hidden)
