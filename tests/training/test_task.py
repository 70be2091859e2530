"""A task of one's own is trained as a plain loop would train each of its models."""

import json
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from primaldual.training import Cosine, Ensemble, Metric, OneCycle, Record, Store, Task, Training, key, train
from primaldual.training.batches import Batches
from primaldual.training.capture import no_waiting
from primaldual.training.task import as_mean, built
from training.tasks import Sums, Words, quick

CPU = torch.device("cpu")


def trained(task, recipe, seeds=(3, 4, 5)):
    training = Training(Ensemble(task, recipe, seeds, CPU))
    training.run()
    return training


def by_hand(task, recipe, seed):
    """A plain loop of one model with torch's optimiser and schedule; its losses by epoch."""
    model = built(task, seed).double()
    batches = Batches(len(task.parts["train"][0]), recipe.batch_size, task.lengths("train"), recipe.lengths)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[recipe.optimizer]
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(learned, recipe.learning_rate, weight_decay=recipe.weight_decay)
    steps = recipe.steps or recipe.epochs * len(batches)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.schedule.rate(step, steps))
    losses, step = [], 0
    while step < steps:
        total = 0.0
        for chosen in batches.of_epoch(len(losses) + 1, [seed], CPU):
            if step == steps:
                break
            batch = [x[chosen.rows[0]] for x in task.parts["train"]]
            loss = as_mean(task.loss(model, *(batch if chosen.length is None else task.cut(chosen.length, *batch))))
            optimizer.zero_grad()
            loss.backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(learned, recipe.clip)
            optimizer.step()
            rates.step()
            total += loss.item() * chosen.rows.shape[1]
            step += 1
        losses.append(total / batches.cases)
    return model.eval(), losses


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (Sums(), {"clip": 0.5}), (Sums(), {"optimizer": "adamw", "weight_decay": 0.1, "clip": None}),
        (Words(), {}), (Words(), {"lengths": 1, "schedule": Cosine(warmup=3)}), (Words(), {"steps": 9}),
    ],
    ids=["clipped", "decayed", "several lengths", "one length", "steps"],
)  # fmt: skip
def test_a_member_trains_as_its_model_alone(task, settings):
    recipe = quick(**settings)
    training = trained(task, recipe)
    for i, seed in enumerate((3, 4, 5)):
        model, losses = by_hand(task, recipe, seed)
        mine, theirs = training.ensemble.model(i).state_dict(), model.state_dict()
        assert mine.keys() == theirs.keys()
        for name, x in mine.items():
            torch.testing.assert_close(x, theirs[name], rtol=0, atol=1e-6, msg=name)
        if recipe.unit == "epoch":
            assert training.history[i]["loss"] == pytest.approx(losses, abs=1e-8)
        with torch.no_grad():
            total, count = task.score(model, *task.parts["test"])
        assert training.history[i]["test"][-1] == pytest.approx(task.finish(total, count).item(), rel=1e-6)


@pytest.mark.parametrize("task", [Sums(norm=False), Words()], ids=["a mean", "a sum"])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_batch_in_parts_gives_what_it_gives_whole(task, parts):
    whole, divided = trained(task, quick()), trained(task, quick(accumulate=parts))
    for mine, theirs in zip(divided.history, whole.history, strict=True):
        for name, values in theirs.items():
            assert mine[name] == pytest.approx(values, rel=1e-9)
    torch.testing.assert_close(divided.ensemble.weights.matrix, whole.ensemble.weights.matrix, rtol=0, atol=1e-9)


def test_members_do_not_know_of_each_other():
    alone = trained(Words(), quick(), (4,)).ensemble.weights.matrix[0]
    torch.testing.assert_close(trained(Words(), quick()).ensemble.weights.matrix[1], alone, rtol=0, atol=1e-12)


def test_batches_are_of_similar_length_in_a_sequence_that_follows_from_the_epoch_alone():
    lengths = torch.randint(1, 100, (70,), generator=torch.Generator().manual_seed(1))
    batches = Batches(70, 8, lengths, groups=3)
    longest = sorted({length for _, length in batches.groups})
    assert len(longest) == 3 and longest[-1] == lengths.max()
    shares = [lengths[rows] for rows, _ in batches.groups]
    assert all(short.max() <= long.min() for short, long in pairwise(shares))
    cuts = {}
    for epoch in (1, 2):
        for seeds in ((0,), (1, 2)):
            found = batches.of_epoch(epoch, seeds, CPU)
            cuts[epoch, seeds] = [(chosen.length, chosen.rows.shape[1]) for chosen in found]
            for member in range(len(seeds)):
                rows = torch.cat([chosen.rows[member] for chosen in found])
                assert sorted(rows.tolist()) == list(range(70))
            for chosen in found:
                assert lengths[chosen.rows].max() <= chosen.length
    assert cuts[1, (0,)] == cuts[1, (1, 2)] != cuts[2, (0,)] == cuts[2, (1, 2)]
    assert len(set(cuts[1, (0,)])) <= 4  # a step per length, and one for what is left
    assert not batches.order(0, 1).equal(batches.order(1, 1))


def test_steps_end_in_the_middle_of_an_epoch_and_are_evaluated_as_said():
    seen = []
    (record,) = train(Sums(), recipe=quick(steps=8, evaluate_every=3), watch=[seen.append])  # 3 batches an epoch
    assert record.history["step"] == [1, 3, 6, 8] and "epoch" not in record.history
    assert record.last.at == 8 and record.steps == 8 and record.unit == "step" and not record.more_is_better
    assert record.best.value == min(record.history["test"])
    assert [(one.done, one.total, one.unit) for one in seen if one.values] == [(at, 8, "step") for at in (1, 3, 6, 8)]
    each = train(Sums(), recipe=quick(steps=8))[0].history["loss"]
    weights = [8, 8, 6, 8, 8, 6, 8, 8]
    assert record.history["loss"][1] == pytest.approx((8 * each[1] + 6 * each[2]) / 14)
    assert record.history["loss"][2] == pytest.approx(
        sum(w * x for w, x in zip(weights[3:6], each[3:6], strict=True)) / 22
    )


def test_a_task_s_own_validation_part_chooses_the_weights_and_ends_by_patience():
    recipe = quick(epochs=60, patience=3, learning_rate=0.2)
    training = trained(Sums(validation=True), recipe)
    for i, history in enumerate(training.history):
        best = history["validation"].index(min(history["validation"]))
        assert history["epoch"][-1] == history["epoch"][best] + 3 < 60
        assert training.ensemble.evaluate("validation")[i].item() == history["validation"][best]
    with pytest.raises(ValueError, match="sums has a validation part; leave out the recipe's share"):
        train(Sums(validation=True), recipe=quick(validation=0.2))


def test_a_share_is_held_out_of_any_task():
    ensemble = Ensemble(Sums(), quick(validation=0.25), (0,), CPU)
    assert (len(ensemble.train), len(ensemble.parts["validation"])) == (16, 6)
    rows = torch.cat([ensemble.train.tensors[1], ensemble.parts["validation"].tensors[1]])
    assert sorted(rows.tolist()) == sorted(Sums().parts["train"][1].tolist())
    words = Ensemble(Words(), quick(validation=0.25), (0,), CPU)  # lengths go with their cases
    assert words.parts["validation"].lengths.sort().values.equal(words.parts["validation"].lengths)
    assert int((words.train.tensors[0] != 2).sum()) == int(words.train.lengths.sum())


def test_what_is_recorded_says_what_was_trained(tmp_path):
    task, recipe = Sums(), quick(steps=4, schedule=OneCycle())
    (record,) = train(task, recipe=recipe, folder=tmp_path)
    written = json.loads((tmp_path / f"{record.key}.json").read_text())
    assert Record.from_dict(written) == record and record.data["hash"] == task.hash and record.data["train"] == 22
    assert written["metric"] == "mse" and written["mechanism"] is None and written["last"]["step"] == 4
    assert written["task"]["settings"] == "Sums(p=0.0, norm=True)"
    assert written["task"]["modules"]["0"] == "Linear(in_features=6, out_features=8, weight[8, 6], bias[8])"
    model = Store(tmp_path).load_model(record.key, task)
    with torch.no_grad():
        assert task.loss(model, *task.parts["test"]).item() == pytest.approx(record.last.value)
    with pytest.raises(ValueError, match="no model of primaldual"):
        Store(tmp_path).model(record.key)
    assert train(task, recipe=recipe, folder=tmp_path) == [record]


def test_the_key_is_of_the_cases_the_model_and_the_recipe():
    names = {key(task, recipe, 0) for task, recipe in [
        (Sums(), quick()), (Sums(p=0.1), quick()), (Sums(norm=False), quick()), (Sums(seed=1), quick()),
        (Sums(validation=True), quick()), (Words(), quick()), (Words(), quick(lengths=2)), (Sums(), quick(steps=9)),
        (Sums(), quick(schedule=Cosine())),
    ]}  # fmt: skip
    assert len(names) == 9
    assert key(Sums(), quick(), 0) == key(Sums(), quick(), 0)


def test_what_a_task_sets_is_in_the_key_however_it_is_set():
    class Smoothed(Sums):
        smoothing, _cache = 0.1, None

    class Rough(Sums):
        smoothing, _cache = 0.3, None

    Rough.__qualname__ = Smoothed.__qualname__
    assert "Smoothed(smoothing=0.1, p=0.0, norm=True)" in Smoothed().about["settings"]
    assert key(Smoothed(), quick(), 0) != key(Rough(), quick(), 0)
    long = Sums()
    long.text = 1000 * "text"
    assert len(long.about["settings"]) < 200 and key(long, quick(), 0) != key(Sums(), quick(), 0)
    changed = Sums()
    changed.activation = torch.tanh
    assert key(changed, quick(), 0) != key(Sums(), quick(), 0)


def test_what_has_other_steps_than_the_first_tensor_is_not_cut():
    text, steps, one_hot, y = torch.zeros(4, 9), torch.zeros(4, 9, 2), torch.zeros(4, 5), torch.zeros(4)
    found = Sums().cut(3, None, text, steps, one_hot, y)
    assert [None if x is None else tuple(x.shape) for x in found] == [None, (4, 3), (4, 3, 2), (4, 5), (4,)]


def test_in_bfloat16_weights_are_kept_in_float32_but_for_what_is_precise():
    class Precise(Sums):
        precise = ("1.",)  # the norm

    for task, norm in ((Sums(), torch.bfloat16), (Precise(), torch.float32)):
        ensemble = Ensemble(task, quick(dtype="bfloat16"), (0, 1), CPU)
        assert ensemble.weights.matrix.dtype == torch.float32 and ensemble.train.tensors[0].dtype == torch.bfloat16
        kinds = {name: x.dtype for name, x in (ensemble.weights.parameters | ensemble.weights.buffers).items()}
        assert (kinds["1.weight"], kinds["1.running_mean"], kinds["3.weight"]) == (norm, norm, torch.bfloat16)
        assert kinds["1.num_batches_tracked"] == torch.int64
    (record,) = train(Sums(norm=False), recipe=quick(dtype="bfloat16", epochs=20))
    assert record.history["test"][-1] < record.history["test"][0] / 2


def test_a_model_without_a_metric_of_its_own_is_scored_by_its_loss():
    task = Sums()
    assert task.metric == Metric("mse", False)
    ensemble = Ensemble(task, quick(), (0, 1), CPU)
    with torch.no_grad():
        expected = [task.loss(ensemble.model(i), *task.parts["test"]).item() for i in range(2)]
    assert ensemble.evaluate("test").tolist() == pytest.approx(expected)


def test_evaluation_in_pieces_is_evaluation_at_once():
    for task in (Sums(), Words()):
        whole = Ensemble(task, quick(), (0, 1), CPU).evaluate("test")
        task.evaluated_at_once = 3
        torch.testing.assert_close(Ensemble(task, quick(), (0, 1), CPU).evaluate("test"), whole)


def test_a_member_that_fails_leaves_the_others_alone():
    healthy = trained(Sums(), quick())
    broken = Training(Ensemble(Sums(), quick(), (3, 4, 5), CPU))
    with torch.no_grad():
        broken.ensemble.weights.matrix[1] = float("nan")
        broken.ensemble.weights.refresh()
    broken.run()
    assert "not finite in epoch 1" in broken.failures[1] and broken.failures[::2] == [None, None]
    assert broken.history[0] == healthy.history[0] and broken.history[2] == healthy.history[2]


class Nothing(Task):
    name = "nothing"

    def __init__(self, **parts):
        self.parts = parts

    def build(self):
        return nn.Identity()

    def loss(self, model, x):
        return x.sum()


def test_a_task_that_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match=r"nothing: parts must have 'train', got \['test'\]"):
        train(Nothing(test=(torch.zeros(3),)), recipe=quick())
    with pytest.raises(ValueError, match="Identity has no parameter to train"):
        train(Nothing(train=(torch.zeros(3),)), recipe=quick())
    words = Words()
    words._lengths["test"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"lengths\('test'\) must be one number per case, \[11\], got \[3\]"):
        train(words, recipe=quick())


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"steps": 9, "schedule": OneCycle()}], ids=str)
@pytest.mark.parametrize("task", [Sums(norm=False), Words()], ids=["sums", "words"])
def test_captured_steps_do_on_a_gpu_what_plain_ones_do_on_a_cpu(task, settings, caplog):
    runs = [train(task, recipe=quick(**settings), seeds=(0, 1), device=device) for device in ("cpu", "cuda")]
    assert "without CUDA graphs" not in caplog.text
    for mine, theirs in zip(*runs, strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], abs=1e-6)


@pytest.mark.gpu
def test_no_batch_of_an_epoch_of_several_lengths_waits_for_the_device():
    training = Training(Ensemble(Words(), quick(), (0, 1), torch.device("cuda")))
    batches = len(training.ensemble.batches)
    for _ in range(batches + 1):
        training.train_batch()
    with no_waiting():
        for _ in range(batches - 1):
            training.train_batch()


def test_what_takes_long_to_keep_is_kept_less_often():
    saves = {}
    for every in (0.0, 1e-9):
        training = Training(Ensemble(Sums(), quick(steps=40, evaluate_every=10), [0], torch.device("cpu")))
        kept = saves[every] = []

        def keep(training, kept=kept):
            kept.append(training.step)
            time.sleep(0.01)  # so that the next is due a fifth of a second later

        training.run(save=keep, every=every)
        assert kept[-1] == 40 and len(training.paces) == 4 and 0 < training.seconds_per_step < 0.1
    assert saves[0.0] == [*range(1, 41), 40] and len(saves[1e-9]) <= 3
