"""A member of an ensemble is the model that its seed would give alone."""

import math

import pytest
import torch
from torch import nn

from primaldual import Primal, mechanism, mechanisms
from primaldual.models import SeriesConfig, build
from primaldual.primal import Laplace, Pooled, Recenter, RmsNorm, Rotary, Scale
from primaldual.training import Ensemble, Recipe, Training, train
from primaldual.training.batches import Batches
from primaldual.training.capture import no_waiting
from primaldual.training.members import InTurn
from primaldual.training.parts import hold_out
from primaldual.training.series_forward import forward
from primaldual.training.stacked import Stacked
from support.own import DoubledKeys
from training.toy import CHANNELS, CLASSES, LENGTH, members, small, toy

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("encoder", ["mvts", "flowformer"])
LEARNING = {
    "bn-learnable": mechanism("bn", learnable=True),
    "sh-conv": mechanism("sh", how="conv"),
    "full-bn+sh-learnable": mechanism("bn+sh", learnable=True, full=True),
    "rotary, tempered": mechanism("qk-norm", temperature=True, rotary=True),
    "rotary, tempered, pooled": Primal(inputs=(Rotary(), RmsNorm(), Scale(learnable=True)), training_set=Pooled()),
    "conv1d of each channel": mechanism("conv1d", channels="each", rotary=True),
    "alibi, learnable": Primal(Laplace(), inputs=(Recenter(learnable=True),), training_set=Pooled()),
    "qk-norm of one's own keys": Primal(inputs=(RmsNorm(),), training_set=DoubledKeys()),
}


@BOTH
@pytest.mark.parametrize("name", [*mechanisms(), *LEARNING])
def test_members_compute_what_each_model_computes(encoder, name):
    length = 16  # a square, for conv2d
    config = SeriesConfig(
        encoder, d_model=16, layers=2, feedforward=24, dropout=0.0, channels=CHANNELS, length=length, outputs=CLASSES,
        mechanism=LEARNING.get(name, name),
    )  # fmt: skip
    seeds, batch = (3, 4, 5), 5
    stacked = Stacked(
        [build(config, seed) for seed in seeds], CPU, torch.float64, torch.float64, left_out=("num_batches_tracked",)
    )
    with torch.no_grad():  # what is learned differs between members
        stacked.matrix += 0.1 * torch.randn_like(stacked.matrix)
    models = [stacked.load_into(build(config, 0), i) for i in range(3)]
    padding = torch.arange(length) >= torch.randint(1, length + 1, (3, batch, 1))
    x = torch.randn(3, batch, length, CHANNELS, dtype=torch.float64).masked_fill(padding.unsqueeze(-1), 0.0)
    for training in (True, False):
        mine = forward(config, stacked, x, padding, training)
        theirs = torch.stack([model.train(training)(x[i], padding[i]) for i, model in enumerate(models)])
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
        stacked.gather(mine.square().sum())
        theirs.square().sum().backward()
        budget = 1e-9 * stacked.matrix.grad.abs().max().item()  # full batch norm divides by small variances
        for i, model in enumerate(models):
            own = dict(stacked.named(stacked.matrix.grad[i]))
            for parameter_name, parameter in model.named_parameters():
                torch.testing.assert_close(own[parameter_name], parameter.grad, rtol=0, atol=budget)
            for buffer_name in stacked.buffers:
                torch.testing.assert_close(stacked.buffers[buffer_name][i], model.get_buffer(buffer_name))
            model.zero_grad()


def by_hand(data, name, recipe: Recipe, seed: int) -> tuple[nn.Module, list[float]]:
    """The plain torch loop: a module, torch's RAdam, torch's clipping, one model."""
    model = build(recipe.model.config(data, name), seed).double()
    optimizer = torch.optim.RAdam(model.parameters(), lr=recipe.learning_rate)
    split, x = data.train, data.train.x.double()
    losses = []
    for epoch in range(1, recipe.epochs + 1):
        total = 0.0
        for rows in Batches(len(x), recipe.batch_size).order(seed, epoch).split(recipe.batch_size):
            scores = model(x[rows], split.padding[rows])
            if data.classes:
                loss = nn.functional.cross_entropy(scores, split.y[rows])
            else:
                loss = nn.functional.mse_loss(scores, split.y[rows].double())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / len(x))
    return model.eval(), losses


@BOTH
@pytest.mark.parametrize("regression", [False, True], ids=["classification", "regression"])
@pytest.mark.parametrize("name", ["bn+sh", "qk-norm"])
def test_a_member_trains_as_the_model_alone(encoder, name, regression):
    data = toy(regression=regression)
    recipe = small(encoder=encoder, epochs=3, clip=0.5)  # so small that it acts, on each member by its own norm
    ensemble = members(data, name, recipe, (7, 8, 9))
    training = Training(ensemble)
    training.run()
    for i, seed in enumerate(ensemble.seeds):
        model, losses = by_hand(data, name, recipe, seed)
        mine = ensemble.model(i)
        assert training.history[i]["loss"] == pytest.approx(losses, abs=1e-9)
        theirs = model.state_dict()
        for key, value in mine.state_dict().items():
            if not key.endswith("num_batches_tracked"):
                torch.testing.assert_close(value, theirs[key], rtol=0, atol=1e-6)
        with torch.no_grad():
            y = model(data.test.x.double(), data.test.padding)
        wrong = y.argmax(-1) == data.test.y if data.classes else (y - data.test.y).square()
        metric = 100 * wrong.double().mean() if data.classes else wrong.mean().sqrt()
        assert training.history[i]["test"][-1] == pytest.approx(metric.item(), rel=1e-6)


@BOTH
@pytest.mark.parametrize("regression", [False, True], ids=["classification", "regression"])
def test_all_at_once_is_one_after_the_other(encoder, regression):
    """The stacked forward of the family, and the way that any model can."""
    ensemble = members(toy(regression=regression), "bn+sh", small(encoder=encoder), (7, 8, 9))
    in_turn = InTurn(ensemble.task, ensemble.weights)
    batch = ensemble._batch(torch.stack([torch.randperm(22)[:8] for _ in range(3)]), None)
    test = ensemble.parts["test"].tensors
    found = []
    for way in (ensemble.members, in_turn):
        for learn in (way.learn, lambda batch, way=way: way.learn_part(batch, add=False)[0]):
            found.append((learn(batch), ensemble.weights.matrix.grad.clone()))
    for (mine, gradient), (theirs, other) in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-9)
    with torch.no_grad():
        (mine, count), (theirs, other) = (way.score(test) for way in (ensemble.members, in_turn))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
    assert count == other == 10 and in_turn.at_once(test) == 256


def test_with_dropout_members_start_as_alone_and_have_masks_of_their_own():
    data, recipe = toy(), small(dropout=0.5, epochs=1)
    ensemble = members(data, "softmax", recipe, (4, 5))
    for i, seed in enumerate((4, 5)):
        alone = build(recipe.model.config(data, "softmax"), seed).double()
        assert all(torch.equal(v, alone.state_dict()[k]) for k, v in ensemble.model(i).state_dict().items())
    twins = members(data, "softmax", recipe, (4, 4))
    rows = torch.arange(8).expand(2, -1)
    x, padding, _ = twins._batch(rows, None)
    still = forward(twins.task.config, twins.weights, x, padding, False)
    assert torch.equal(still[0], still[1])
    scores = forward(twins.task.config, twins.weights, x, padding, True)
    assert not torch.allclose(scores[0], scores[1])


def test_every_series_is_seen_once_an_epoch_in_an_order_of_the_seed_and_the_epoch():
    order = Batches(50, 8).order
    assert sorted(order(3, 1).tolist()) == list(range(50)) and order(3, 1).equal(order(3, 1))
    assert not order(3, 1).equal(order(3, 2)) and not order(3, 1).equal(order(4, 1))


def test_bfloat16_members_keep_float32_weights_and_learn():
    records = train(toy(60, 20), "bn", small(dtype="bfloat16", epochs=8, learning_rate=1e-2), [0])
    ensemble = members(toy(), "bn", small(dtype="bfloat16"), (0,))
    assert ensemble.weights.matrix.dtype == torch.float32
    kinds = {name: view.dtype for name, view in ensemble.weights.parameters.items()}
    assert kinds["head.weight"] == torch.bfloat16 and kinds["layers.0.norm1.weight"] == torch.float32
    regression = members(toy(regression=True), "bn", small(dtype="bfloat16"), (0,))
    assert regression.weights.parameters["head.weight"].dtype == torch.float32
    regression.step(torch.arange(8)[None])
    before = ensemble.weights.parameters["head.weight"].clone()
    for _ in range(3):
        ensemble.step(torch.arange(8)[None])
    start = ensemble.weights.matrix[:, ensemble.weights.exact :]
    assert torch.equal(ensemble.weights.reduced, start.bfloat16()) and not torch.equal(
        ensemble.weights.parameters["head.weight"], before
    )
    assert all(record.last.value >= 80 for record in records)


def test_a_loss_that_is_not_finite_stops_that_member_alone():
    data, recipe = toy(), small(epochs=4)
    seen = []
    healthy = Training(members(data, "softmax", recipe, (0, 1, 2)))
    healthy.run()
    broken = Training(members(data, "softmax", recipe, (0, 1, 2)))
    with torch.no_grad():
        broken.ensemble.weights.matrix[1] = 1e200
    broken.run([seen.append])
    assert "not finite in epoch 1" in broken.failures[1] and broken.failures[::2] == [None, None]
    assert "seed 1 stops, the others go on" in seen[0].messages[0]
    assert broken.ensemble.weights.matrix[1].isfinite().all()
    assert broken.history[1]["epoch"] == [] and seen[-1].seeds == (0, 2)
    for i in (0, 2):
        assert broken.history[i] == healthy.history[i]
        assert torch.equal(broken.ensemble.weights.matrix[i], healthy.ensemble.weights.matrix[i])


def test_training_ends_when_no_member_is_left():
    training = Training(members(toy(), "softmax", small(epochs=50), (0,)))
    with torch.no_grad():
        training.ensemble.weights.matrix[0, 0] = math.nan
    training.run()
    assert training.epoch == 2 and training.failures[0]


def test_what_is_held_out_is_stratified_and_apart_from_what_is_trained_on():
    data = toy(90, 10)
    rows, held = hold_out("Toy", 90, data.train.y, 0.2)
    assert sorted([*rows.tolist(), *held.tolist()]) == list(range(90))
    counts, whole = data.train.y[held].bincount(minlength=3), data.train.y.bincount(minlength=3)
    assert counts.tolist() == [round(0.2 * n) for n in whole.tolist()]
    ensemble = members(data, "softmax", small(validation=0.2), (0,))
    assert torch.equal(ensemble.train.tensors[0], data.train.x[rows].double())
    assert torch.equal(ensemble.parts["validation"].tensors[0], data.train.x[held].double())
    with pytest.raises(ValueError, match="give a larger"):
        hold_out("Toy", 6, toy(6).train.y, 0.01)


def test_patience_stops_a_member_and_gives_the_weights_of_its_best_validation_epoch():
    data = toy(60, 20)
    recipe = small(epochs=60, validation=0.3, patience=4, learning_rate=0.02)
    training = Training(members(data, "softmax", recipe, (0, 1)))
    training.run()
    for i, history in enumerate(training.history):
        best = history["validation"].index(max(history["validation"]))
        assert history["epoch"][-1] == min(60, history["epoch"][best] + 4) and history["epoch"][-1] < 60
        found = training.ensemble.evaluate("validation")[i].item(), training.ensemble.evaluate("test")[i].item()
        assert found == (history["validation"][best], history["test"][best])


def test_balanced_classes_weigh_alike():
    ensemble = members(toy(), "softmax", small(balanced=True), (0, 1))
    scores, y = torch.randn(2, 6, 3).double(), torch.tensor([[0, 0, 0, 0, 1, 2]] * 2)
    weights = ensemble.members.class_weights
    expected = [nn.functional.cross_entropy(scores[i], y[i], weights).item() for i in range(2)]
    total, count = ensemble.task.loss_of(scores, y, weights)
    assert (total / count).tolist() == pytest.approx(expected)
    counts = ensemble.train.tensors[2].bincount()
    assert torch.allclose(weights * counts, (weights * counts)[0])


def test_the_callers_random_state_is_left_alone():
    state = torch.get_rng_state()
    train(toy(), "softmax", small(dropout=0.3, epochs=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_in_pieces_is_evaluation_at_once(monkeypatch):
    ensemble = members(toy(), "bn+sh", small(), (0, 1))
    whole = ensemble.evaluate("test").clone()
    monkeypatch.setattr("primaldual.training.series.EVALUATED", 3 * 2 * LENGTH)
    assert torch.equal(ensemble.evaluate("test"), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "bn+sh", "qk-norm", "linear-bn+sh", "sparse"])
def test_captured_steps_do_on_a_gpu_what_plain_ones_do_on_a_cpu(name):
    data, recipe = toy(), small(epochs=3)
    runs = []
    for device in ("cpu", "cuda"):
        training = Training(members(data, name, recipe, (0, 1, 2), device))
        training.run()
        runs.append(training)
    for mine, theirs in zip(runs[1].history, runs[0].history, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6) and mine["epoch"] == theirs["epoch"]
    torch.testing.assert_close(
        runs[1].ensemble.weights.matrix.cpu(), runs[0].ensemble.weights.matrix, rtol=0, atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["softmax", "bn+sh", "qk-norm"])
def test_captured_dropout_differs_between_steps_and_repeats_with_the_seed(name, dtype):
    data, recipe = toy(60, 20), small(dropout=0.3, epochs=12, dtype=dtype, learning_rate=5e-3)
    first, again = (train(data, name, recipe, (0, 1), device="cuda") for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-2)
        assert one.best.value >= 60
    ensemble = members(data, name, small(dropout=0.3, learning_rate=1e-30, dtype=dtype), (0,), "cuda")
    rows = torch.arange(8, device="cuda")[None]
    totals = []
    for _ in range(2):
        ensemble.total.zero_()
        ensemble.step(rows)
        totals.append(ensemble.total.item())
    assert totals[0] != totals[1]


@pytest.mark.gpu
def test_scales_out_of_order_are_captured_and_train_on_a_gpu_as_on_a_cpu(caplog):
    mixed = mechanism("sh", scales=(1, 2) * 4)
    runs = [train(toy(), mixed, small(), (0, 1), device=device) for device in ("cpu", "cuda")]
    assert "without CUDA graphs" not in caplog.text
    for mine, theirs in zip(*runs, strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], abs=1e-6)


@pytest.mark.gpu
def test_what_cannot_be_captured_trains_all_the_same(caplog, monkeypatch):
    step = Ensemble._step

    def waiting(self: Ensemble, rows: torch.Tensor, length: int | None = None) -> torch.Tensor:
        assert rows.sum().item() > 0
        return step(self, rows, length)

    monkeypatch.setattr(Ensemble, "_step", waiting)
    runs = [train(toy(), "bn+sh", small(), (0, 1), device=device) for device in ("cpu", "cuda")]
    assert "without CUDA graphs" in caplog.text
    for mine, theirs in zip(*runs, strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], abs=1e-6)


@pytest.mark.gpu
def test_no_batch_of_an_epoch_waits_for_the_device():
    training = Training(members(toy(), "bn+sh", small(dtype="float32", dropout=0.1), (0, 1), "cuda"))
    batches = len(training.ensemble.batches)
    for _ in range(batches + 1):  # captures; then the order of the second epoch goes to the device
        training.train_batch()
    with no_waiting():
        for _ in range(batches - 1):
            training.train_batch()


@pytest.mark.gpu
def test_a_member_that_fails_on_a_gpu_leaves_the_others_alone():
    training = Training(members(toy(), "softmax", small(), (0, 1), "cuda"))
    with torch.no_grad():
        training.ensemble.weights.matrix[0] = math.nan
    training.run()
    assert training.failures[0] and training.failures[1] is None
    assert training.ensemble.weights.matrix[1].isfinite().all()
