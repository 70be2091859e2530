"""The recipe for people: what is changed in a series, what is trained, and what predicts."""

from dataclasses import replace

import pytest
import torch

from primaldual.data import Dataset, Split
from primaldual.models import BankSizes, PatternSizes
from primaldual.training import Augmentation, Ensemble, ModernRecipe, PatternTask, Store, fit, train
from primaldual.training.calibration import calibrate

NONE = {"jitter": 0.0, "scaling": 0.0, "warp": 0.0, "drop": 0.0, "cut": 0.0, "mix": 0.0}
TINY = PatternSizes(d_model=8, heads=2, layers=1, feedforward=8, widths=(3, 5), blocks=1, tokens=10)
RECIPE = ModernRecipe(
    banks=(BankSizes(prototypes=64),), members=(TINY, replace(TINY, widths=(3,))), steps=60, learning_rate=5e-3
)


def waves(count, seed, kind="classification"):
    """Waves of three frequencies, at any phase, some of them shorter."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    phase = 6.28 * torch.rand(count, 1, generator=generator)
    angle = torch.arange(40) * (0.3 + 0.25 * y[:, None]) + phase
    x = torch.stack([angle.sin(), angle.cos(), torch.randn(count, 40, generator=generator)], -1)
    lengths = torch.where(torch.arange(count) % 4 == 0, 30, 40)
    x = x.masked_fill((torch.arange(40) >= lengths[:, None]).unsqueeze(-1), 0.0)
    return Split(x, lengths, y if kind == "classification" else y.float() - 1)


def dataset(kind="classification"):
    classes = ("a", "b", "c") if kind == "classification" else ()
    train, test = waves(36, 0, kind), waves(30, 1, kind)
    return Dataset("waves", kind, classes, train, test, torch.zeros(3), torch.ones(3), 40)


@pytest.mark.parametrize("part", NONE)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_every_part_of_an_augmentation_changes_series_and_leaves_padding_empty(part, padded):
    torch.manual_seed(0)
    split = waves(8, 0)
    padding, targets = (split.padding if padded else None), torch.eye(3)[split.y]
    x, hidden, soft = Augmentation(**NONE | {part: 0.5})(split.x, padding, targets)
    assert x.shape == split.x.shape and not torch.equal(x, split.x) and x.isfinite().all()
    assert torch.equal(soft, targets) == (part != "mix")
    torch.testing.assert_close(soft.sum(1), torch.ones(8))
    if padded:
        assert hidden is not None and not (x.abs().amax(-1)[hidden] > 0).any()


def test_an_augmentation_of_nothing_changes_nothing():
    split = waves(4, 0)
    x, padding, targets = Augmentation(**NONE)(split.x, split.padding, torch.eye(3)[split.y])
    assert torch.equal(x, split.x) and torch.equal(padding, split.padding) and torch.equal(targets.argmax(1), split.y)


def test_no_speed_or_shift_leaves_a_series_where_it_was():
    split = waves(4, 0)
    x, _, _ = Augmentation(**NONE | {"warp": 1e-9})(split.x, split.padding, torch.eye(3)[split.y])
    torch.testing.assert_close(x, split.x, rtol=0, atol=1e-4)


def test_mixed_series_lie_between_two_and_so_do_their_targets():
    torch.manual_seed(0)
    split = waves(6, 0)
    targets = torch.eye(3)[split.y]
    x, _, soft = Augmentation(**NONE | {"mix": 0.5})(split.x, None, targets)
    share = (1 - soft.gather(1, split.y[:, None])).unsqueeze(-1)  # neighbours are of different classes
    torch.testing.assert_close(x, (1 - share) * split.x + share * split.x.roll(1, 0))
    assert 0 < share.max() <= 0.5


def test_series_are_augmented_in_training_alone():
    task = PatternTask(dataset(), "softmax", replace(TINY, dropout=0.0), Augmentation(jitter=0.9), 0.1)
    model, batch = task.build().eval(), task.tensors("train", torch.float32, torch.device("cpu"))
    assert torch.equal(task.loss(model, *batch), task.loss(model, *batch))
    model.train()
    assert not torch.equal(task.loss(model, *batch), task.loss(model, *batch))


def test_a_run_is_recorded_and_its_model_found_again(tmp_path):
    task = PatternTask(dataset(), "softmax", replace(TINY, positions=False), Augmentation(), 0.1)
    recipe = RECIPE.training(task.dataset, task.sizes)
    (record,) = train(task, recipe=replace(recipe, steps=3), seeds=(0,), folder=tmp_path)
    split = task.dataset.test
    found = Store(tmp_path).model(record.key)(split.x, split.padding)
    accuracy = 100 * float((found.argmax(1) == split.y).float().mean())
    assert accuracy == pytest.approx(record.last.value)


@pytest.mark.parametrize("changes", [{"smoothing": 0.2}, {"augmentation": Augmentation(cut=0.2)}, {}], ids=str)
def test_what_is_learned_otherwise_is_another_run(changes):
    def identity(**settings):
        return PatternTask(dataset(), "softmax", TINY, **settings).identity()

    same = {"augmentation": Augmentation(), "smoothing": 0.1}
    assert (identity(**same) == identity(**same | changes)) == (not changes)


def test_banks_and_members_learn_and_a_seed_gives_the_same_again():
    data = dataset()
    model = fit(data, RECIPE, seed=3)
    right = {name: float((p.argmax(1) == data.test.y).double().mean()) for name, p in model.parts(data.test).items()}
    assert right["bank"] > 0.9 and right["members"] > 0.6
    found = model.predict(data.test)
    torch.testing.assert_close(found.sum(1), torch.ones(30, dtype=torch.float64))
    assert torch.equal(found, fit(data, RECIPE, seed=3).predict(data.test))
    assert not torch.equal(found, fit(data, RECIPE, seed=4).predict(data.test))


def test_parts_side_by_side_are_those_that_are_fitted_in_turn():
    data, recipe = dataset(), replace(RECIPE, banks=2 * RECIPE.banks, steps=20)
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    found = [fit(data, recipe, seed=3, jobs=jobs).predict(data.test) for jobs in (1, 3)]
    assert torch.equal(*found)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), before)


def test_no_time_leaves_a_bank_or_a_member_that_has_only_begun():
    data = dataset()
    model = fit(data, replace(RECIPE, banks=3 * RECIPE.banks), seed=0, seconds=0.0)
    assert len(model.banks) == 1 and not model.members and model.predict(data.test).isfinite().all()
    model = fit(data, replace(RECIPE, banks=()), seed=0, seconds=0.0)
    assert not model.banks and [one.steps for one in model.members] == [1]


def test_in_little_time_members_have_fewer_steps(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr("primaldual.training.modern_fit.time.monotonic", lambda: next(clock) / 100)
    monkeypatch.setattr("primaldual.training.modern_fit.SPENT", 0.2)
    model = fit(dataset(), RECIPE, seed=0, seconds=0.6)
    assert 20 <= model.members[0].steps < 60


def test_a_later_fit_keeps_what_an_earlier_one_found_and_members_go_on(monkeypatch):
    data = dataset()
    few = fit(data, replace(RECIPE, members=RECIPE.members[:1], steps=20), seed=0)
    more = fit(data, replace(RECIPE, steps=20), seed=0, before=few)
    assert [one is other for one, other in zip(more.fitted, few.fitted, strict=False)] == [True, True, False]
    assert torch.equal(more.predict(data.test), fit(data, replace(RECIPE, steps=20), seed=0).predict(data.test))
    begun = []
    monkeypatch.setattr(Ensemble, "start_from", lambda self, member, state: begun.append(state))
    longer = fit(data, replace(RECIPE, steps=50), seed=0, before=more)
    assert [one.steps for one in longer.members] == [50, 50]
    for state, one in zip(begun, more.members, strict=False):
        assert all(torch.equal(state[name], x) for name, x in one.model.state_dict().items())
    assert len(begun) == 3
    other = fit(data, replace(RECIPE, steps=20, learning_rate=1e-4), seed=0, before=more)
    assert other.banks == more.banks and not set(other.members) & set(more.members)


def test_a_member_starts_from_the_weights_of_a_model():
    task = PatternTask(dataset(), "softmax", TINY)
    first, second = (
        Ensemble(task, RECIPE.training(task.dataset, TINY), [seed], torch.device("cpu")) for seed in (0, 1)
    )
    state = first.model(0).state_dict()
    second.start_from(0, state)
    assert all(torch.equal(state[name], x) for name, x in second.model(0).state_dict().items())


def test_a_part_is_fitted_by_one_thread():
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        fit(dataset(), replace(RECIPE, steps=20), seed=0, watch=[lambda _: seen.add(torch.get_num_threads())])
        assert seen == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_mixed_series_are_weighed_as_their_parts_are(kind):
    found = []
    for weight in (1.0, 2.0):
        task = PatternTask(
            dataset(kind), "softmax", replace(TINY, dropout=0.0), Augmentation(), 0.1, torch.full((36,), weight)
        )  # fmt: skip
        torch.manual_seed(0)
        found.append(task.loss(task.build().train(), *task.tensors("train", torch.float32, torch.device("cpu"))))
    torch.testing.assert_close(found[1], 2 * found[0])


def test_weights_of_cases_are_those_of_copies_for_values_and_loss():
    data = dataset()
    weights = torch.where(data.train.y == 1, 3.0, 1.0)
    task = PatternTask(data, "softmax", replace(TINY, dropout=0.0), None, 0.0, weights / weights.mean())
    model, batch = task.build().eval(), task.tensors("train", torch.float32, torch.device("cpu"))
    rows = torch.arange(36).repeat_interleave(weights.long())
    copied = PatternTask(data, "softmax", replace(TINY, dropout=0.0))
    expected = copied.loss(model, *(None if x is None else x[rows] for x in batch[:3]))
    torch.testing.assert_close(task.loss(model, *batch), expected)
    assert task.hash != copied.hash
    plain, weighed = (
        fit(data, replace(RECIPE, steps=20), seed=0, weights=w).predict(data.test)[:, 1].mean() for w in (None, weights)
    )
    assert weighed > plain + 0.02


def test_probabilities_are_calibrated_on_cases_that_were_not_seen():
    torch.manual_seed(0)
    y = torch.arange(400) % 2
    logits = torch.randn(400, 2) + 1.5 * torch.eye(2)[y]  # of these the probabilities are right with a factor of 1.5
    found = calibrate((6 * logits).double().softmax(1), y)
    assert found.temperature == pytest.approx(4.0, rel=0.25) and found.after < found.before
    assert calibrate((6 * logits[:3]).double().softmax(1), torch.tensor([0, 1, 0])).cases == 3
    model = fit(dataset(), RECIPE, seed=0)
    assert model.calibration.cases == 6 and model.temperature == model.calibration.temperature
    alone = fit(dataset(), replace(RECIPE, members=()), seed=0)
    assert alone.calibration.cases == 36
    assert fit(dataset(), replace(RECIPE, calibration=0.0), seed=0).calibration is None


def test_numbers_are_predicted():
    data = dataset("regression")
    error = (fit(data, RECIPE, seed=0).predict(data.test).squeeze(1) - data.test.y).square().mean().sqrt()
    assert error < 0.6 < data.test.y.std()


def test_there_are_as_many_steps_as_the_size_of_a_set_allows():
    data = dataset()
    assert replace(RECIPE, steps=1000).training(data, TINY).steps == 450  # 400 passes of 36 series, 32 at a time
    assert replace(RECIPE, steps=1000, work=0.01).training(data, TINY).steps < 450


def test_many_series_have_fewer_prototypes(monkeypatch):
    monkeypatch.setattr("primaldual.training.solving.FEATURES", 36 * 3 * 20)
    monkeypatch.setattr("primaldual.training.solving.LEAST", 1)
    model = fit(dataset(), replace(RECIPE, members=()), seed=0)
    assert len(model.banks[0].model.mean) in range(60, 80)  # as many of every dilation


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"banks": (), "members": ()}, "give banks, members"), ({"share": 1.5}, "share"), ({"mechanism": "s"}, "softmax")],
)  # fmt: skip
def test_a_recipe_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(RECIPE, **changes)
