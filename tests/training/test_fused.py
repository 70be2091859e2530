"""The fused training step against the readable one: scores, gradients, running moments, whole steps."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from primaldual.kernels import encoder as fused
from primaldual.kernels.encoder.sums import weight_gradient
from primaldual.models import SeriesConfig, build
from primaldual.training import Cosine, Ensemble, OneCycle, Training
from primaldual.training.optimizer import Optimizer
from primaldual.training.series import SeriesTask
from primaldual.training.series_forward import forward
from primaldual.training.stacked import Stacked
from support.interpreter import ON_CPU, child_process
from training.tasks import Sums, Words, quick
from training.toy import small, toy

# numpy's, in the interpreter: hashes wrap around, and what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)
DEVICES = ["cpu"] if ON_CPU else [pytest.param("cuda", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize("device", DEVICES)


test_the_kernels_in_the_interpreter = child_process(__file__)
test_more_of_them_in_the_interpreter = child_process(__file__, deep=True)


def stacked(config: SeriesConfig, seeds, device, kept: torch.dtype, computed: torch.dtype) -> Stacked:
    models = [build(config, seed) for seed in seeds]
    return Stacked(models, device, kept, computed, ("norm",), ("num_batches_tracked",))


def both(config: SeriesConfig, device: str, dtype: torch.dtype = torch.float32) -> tuple[Stacked, Stacked]:
    """Members that are computed by the kernels, and the same by the formulas in float64."""
    seeds, where = (3, 4, 5), torch.device(device)
    ours = stacked(config, seeds, where, torch.float32, dtype)
    truth = stacked(config, seeds, where, torch.float64, torch.float64)
    assert ours.fused and not truth.fused
    with torch.no_grad():
        noise = 0.1 * torch.randn(ours.matrix.shape, device=where)
        for one in (ours, truth):
            for name, view in one.named(one.matrix):
                view += dict(ours.named(noise))[name]
            one.refresh()
    return ours, truth


@everywhere
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("encoder", ["mvts", "flowformer"])
@pytest.mark.parametrize(("length", "channels", "d_model", "padded"), [(12, 3, 16, True), (7, 8, 24, False)])
def test_scores_gradients_and_moments_are_those_of_the_formulas(
    encoder, task, length, channels, d_model, padded, device
):
    outputs = 1 if task == "regression" else 5
    config = SeriesConfig(
        encoder, d_model, layers=2, feedforward=40, dropout=0.0, channels=channels, length=length, outputs=outputs,
        mechanism="bn", task=task,
    )  # fmt: skip
    ours, truth = both(config, device)
    batch = 6
    x = torch.randn(3, batch, length, 8, device=device)
    x[..., channels:] = 0.0
    padding = None
    if padded:
        padding = torch.arange(length, device=device) >= torch.randint(2, length + 1, (3, batch, 1), device=device)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
    for training in (True, False):
        scores, expected = (
            forward(config, ours, x, padding, training),
            forward(config, truth, x.double(), padding, training),
        )
        torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-5)
        if not training:
            continue  # nobody asks for gradients there
        up = torch.randn_like(scores)
        ours.gather((scores * up).sum())
        truth.gather((expected * up.double()).sum())
        found, wanted = dict(ours.named(ours.matrix.grad)), dict(truth.named(truth.matrix.grad))
        for name, gradient in wanted.items():
            budget = 1e-4 * max(1.0, gradient.abs().max().item())
            torch.testing.assert_close(found[name].double(), gradient, rtol=0, atol=budget, msg=name)
        for name, buffer in truth.buffers.items():
            torch.testing.assert_close(ours.buffers[name].double(), buffer, rtol=1e-5, atol=1e-6, msg=name)


@everywhere
def test_dropout_drops_its_share_and_the_backward_pass_finds_the_mask_again(device):
    p, rows, width = 0.3, 600, 48
    x = torch.zeros(2, rows, width, device=device)
    a = torch.ones(2, rows, width, device=device, requires_grad=True)
    weight = torch.eye(width, device=device).expand(2, -1, -1).contiguous()
    zero, one = torch.zeros(2, width, device=device), torch.ones(2, width, device=device)
    norm = fused.Norm(one, zero, zero.clone(), one.clone())
    for seed in (7, 8):
        drop = fused.Dropout(p, torch.tensor([seed], dtype=torch.int32, device=device))
        y = fused.add_norm(x, a, weight, zero, norm, drop, True)
        kept = y > 0
        assert kept.float().mean().item() == pytest.approx(1 - p, abs=4 * (p * (1 - p) / kept.numel()) ** 0.5)
        for dim in (1, 2):
            spread = kept.float().mean(dim).std().item()
            assert spread == pytest.approx((p * (1 - p) / kept.shape[dim]) ** 0.5, rel=0.35)
        assert not torch.equal(kept[0], kept[1])
        (gradient,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), a)
        torch.testing.assert_close(gradient != 0, kept)
    up = torch.randn_like(y)
    other = fused.add_norm(x, a, weight, zero, norm, drop, True)
    assert torch.equal(other > 0, kept)
    (first,) = torch.autograd.grad((other * up).sum(), a)
    reference = a * kept / (1 - p)
    reference = (reference - reference.mean(1, keepdim=True)) * (
        reference.var(1, keepdim=True, correction=0) + 1e-5
    ).rsqrt()
    (second,) = torch.autograd.grad((reference * up).sum(), a)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@everywhere
@pytest.mark.parametrize("p", [0.1, pytest.param(0.5, marks=pytest.mark.deep)])
def test_rows_columns_members_and_seeds_are_dropped_independently(p, device):
    """Any two of them agree as often as chance has it."""
    members, rows, width = 3, 192, 40
    zeros, one = torch.zeros(members, rows, width, device=device), torch.ones(members, rows, width, device=device)
    kept = []
    for seed in (7, 8):
        drop = fused.Dropout(p, torch.tensor([seed], dtype=torch.int32, device=device))
        kept.append(fused.embed(zeros, zeros[:, 0], one, 1.0, drop) > 0)
    x = (torch.cat(kept).double() - (1 - p)) / (p * (1 - p)) ** 0.5
    whole = x.flatten(1)
    assert (whole @ whole.mT / whole.shape[1] ** 0.5).triu(1).abs().max() < 4.5
    for side in (x, x.mT):
        pairs = side @ side.mT / side.shape[-1] ** 0.5
        pairs = pairs[:, *torch.triu_indices(side.shape[1], side.shape[1], 1)]
        assert pairs.mean().abs() < 4.5 / pairs.numel() ** 0.5
        assert pairs.square().mean().item() == pytest.approx(1.0, abs=0.1)


@everywhere
def test_gelu_of_16_bits_is_off_by_its_rounding(device):
    z = torch.linspace(-7.5, 7.5, 64, device=device, dtype=torch.float16).view(1, 1, 1, 64).requires_grad_()
    weight = torch.eye(64, device=device, dtype=torch.float16).unsqueeze(0)
    y = fused.head(z, weight, torch.zeros(1, 64, device=device), None, None)
    exact = z.detach().double().requires_grad_()
    expected = torch.nn.functional.gelu(exact)
    torch.testing.assert_close(y.double(), expected.view_as(y), rtol=6e-4, atol=1e-6)
    (found,), (wanted,) = (torch.autograd.grad(out.sum(), of) for out, of in ((y, z), (expected, exact)))
    torch.testing.assert_close(found.double(), wanted, rtol=6e-4, atol=1e-4)


@everywhere
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(("rows", "width"), [(50, 24), pytest.param(700, 64, marks=pytest.mark.deep)])
def test_the_input_beside_a_product_gets_both_gradients(rows, width, p, device):
    def leaf(*shape):
        return torch.randn(2, *shape, device=device).requires_grad_()

    inputs = [leaf(rows, width), leaf(width, width), leaf(width), leaf(width, width), leaf(width)]
    one, zero = torch.ones(2, width, device=device), torch.zeros(2, width, device=device)
    drop = fused.Dropout(p, torch.tensor([5], dtype=torch.int32, device=device)) if p else None
    up, found = torch.randn(2, rows, width, device=device), []
    for beside in (True, False):
        x, weight, bias, *out = inputs
        norm = fused.Norm(one, zero, zero.clone(), one.clone())
        y = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
        if beside:
            y, x = fused.linear_beside(x, weight, bias)
        y = fused.add_norm(x, y.sin(), *out, norm, drop, True)
        found.append(torch.autograd.grad((y * up).sum(), inputs))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * rows**0.5)


@everywhere
def test_every_place_of_the_model_has_dropout_of_its_own(device):
    """No two draws of the masks give the same scores."""
    config = SeriesConfig(d_model=16, layers=1, feedforward=16, dropout=0.2, channels=3, length=6, outputs=4)
    ours = stacked(config, (0,), torch.device(device), torch.float32, torch.float32)
    x = torch.randn(1, 4, 6, 8, device=device)
    x[..., 3:] = 0.0
    draws = torch.stack([forward(config, ours, x, None, True).detach() for _ in range(3)])
    assert (draws[0] - draws[1]).abs().max() > 1e-3 and (draws[1] - draws[2]).abs().max() > 1e-3


@everywhere
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("radam", {}), ("adam", {"schedule": OneCycle(low=0.7)}),
        ("adamw", {"schedule": Cosine(warmup=2), "weight_decay": 0.3}),
        ("adamw", {"square_beta": 0.9, "weight_decay": 0.3, "decayed": torch.arange(40) % 3 == 0}),
    ],
)  # fmt: skip
def test_an_update_is_the_optimisers(kind, settings, reduced, device):
    torch.manual_seed(0)
    start, gradient = torch.randn(2, 3, 40, device=device).unbind()
    alive = torch.tensor([True, False, True], device=device)
    norms = torch.linalg.vector_norm(gradient, dim=1)
    settings = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in settings.items()}
    matrices = []
    for combined in (False, True):
        matrix = start.clone()
        matrix.grad = gradient.clone()
        optimizer = Optimizer(matrix, kind, 1e-2, 8, **settings)
        copy = matrix[:, 24:].to(torch.float16) if reduced else matrix[:, 40:]
        for _ in range(9):  # one more than was said: the last coefficients are used again
            if combined:
                optimizer.clipped_step(norms, 2.0, alive, copy)
            else:
                matrix.grad.copy_(gradient * (2.0 / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1))
                matrix.grad.masked_fill_(~alive.unsqueeze(1), 0.0)
                optimizer.step()
        matrices.append(matrix)
        if reduced and combined:
            torch.testing.assert_close(copy, matrix[:, 24:].to(torch.float16))
    torch.testing.assert_close(*matrices, rtol=1e-5, atol=1e-6)


@everywhere
@pytest.mark.parametrize("encoder", ["mvts", "flowformer"])
def test_steps_of_an_ensemble_lead_where_the_formulas_lead(encoder, device):
    recipe = small(encoder=encoder, dtype="float32")
    data = toy()
    found = []
    for dtype in ("float32", "float64"):
        task = SeriesTask.of(data, "softmax", recipe)
        ensemble = Ensemble(task, replace(recipe, dtype=dtype), (0, 1), torch.device(device))
        rows = torch.stack([torch.arange(8), torch.arange(8, 16)]).to(device)
        for _ in range(5):
            ensemble.step(rows)
        found.append((ensemble.total.double(), ensemble.evaluate("test").double()))
    torch.testing.assert_close(*(total for total, _ in found), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(*(metric for _, metric in found), rtol=0, atol=0.1)


@everywhere
@pytest.mark.parametrize("task", [Sums(norm=False), Words()], ids=["sums", "words"])
def test_steps_of_any_task_lead_where_those_of_torch_lead(task, device):
    found = []
    for dtype in ("float32", "float64"):
        recipe = quick(steps=6, dtype=dtype, optimizer="adamw", weight_decay=0.1, schedule=OneCycle(), accumulate=2)
        training = Training(Ensemble(task, recipe, (0, 1), torch.device(device)))
        assert training.ensemble.weights.fused == (dtype == "float32")
        training.run()
        found.append(training.ensemble.weights.matrix.double())
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


@everywhere
@pytest.mark.parametrize("rows", [100, 2048])
def test_a_weights_gradient_is_the_product_however_it_is_divided(rows, device):
    dy, x = torch.randn(3, rows, 24, device=device), torch.randn(3, rows, 16, device=device)
    expected = torch.einsum("mro,mri->moi", dy.double(), x.double())
    torch.testing.assert_close(weight_gradient(dy, x).double(), expected, rtol=0, atol=1e-5 * rows)
