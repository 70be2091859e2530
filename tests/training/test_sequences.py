"""Long sequences as a task: what a batch is, what cutting it changes, and what is tested when."""

import numpy as np
import pytest
import torch

from primaldual.training import Recipe, SequenceTask, Store, train
from primaldual.training.ensemble import Ensemble
from primaldual.training.loop import Training
from training.sequences import SIZES, sequences, short


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("pairs", [False, True], ids=["single", "pairs"])
def test_a_batch_is_the_tokens_of_its_documents_and_zeros_beyond(bits, pairs):
    data = sequences(pairs=pairs, bits=bits)
    task = SequenceTask(data, sizes=SIZES)
    rows = torch.tensor([5, 0, 7])
    tokens, padding, labels = task.take(task.parts["train"], rows, 128)
    wanted = data.parts["train"].documents[rows.numpy()]
    assert tokens.shape == padding.shape == (*wanted.shape, 128)
    for index in np.ndindex(wanted.shape):
        document = data.documents[wanted[index]][:128]
        assert tokens[index].tolist() == document.tolist() + [0] * (128 - len(document))
        assert padding[index].tolist() == [False] * len(document) + [True] * (128 - len(document))
    assert labels.tolist() == data.parts["train"].labels[rows.numpy()].tolist()


@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "bn+sh", "conv1d", "linear", "sparse", "sparse-bn+sh"])
def test_cutting_a_batch_to_its_longest_document_changes_no_score(name):
    data = sequences()
    task = SequenceTask(data, name, SIZES)
    model = task.build().double().eval()
    rows = torch.from_numpy(np.argsort(data.documents.lengths[:24])[:8].copy())
    whole, cut = (
        task.take(task.parts["train"], rows, length)[:2] for length in (None, int(task.lengths("train")[rows].max()))
    )
    assert cut[0].shape[1] < whole[0].shape[1]
    torch.testing.assert_close(model(*cut), model(*whole), rtol=1e-12, atol=1e-12)


def test_black_pixels_are_hidden_where_they_are_said_to_be():
    data = sequences(bits=8, shift=0, full=True)
    rows = torch.arange(3)
    hidden, seen = (
        SequenceTask(data, sizes=Recipe(SIZES, steps=1).having(black_pixels_are_padding=rule).model)
        for rule in (True, False)
    )
    tokens, padding, _ = hidden.take(hidden.parts["train"], rows)
    assert padding.equal(tokens == 0) and bool(padding.any())
    assert seen.take(seen.parts["train"], rows)[1] is None


def test_the_test_part_can_wait_for_the_end_and_gives_what_it_would_have_given():
    task = SequenceTask(sequences(), "softmax", SIZES)
    always, waiting = (train(task, recipe=short(test_at_end=wait), seeds=[0, 1]) for wait in (False, True))
    for mine, other in zip(waiting, always, strict=True):
        assert mine.best is None and other.best is not None
        assert (mine.last, mine.selected, mine.validation) == (other.last, other.selected, other.validation)
        known = {mine.selected.at, mine.last.at}
        assert [x is not None for x in mine.history["test"]] == [at in known for at in mine.history["step"]]


@pytest.mark.parametrize(("at", "times"), [(2, 2), (6, 1)], ids=["other weights", "the last weights"])
def test_the_test_part_is_looked_at_once_more_where_validation_chose_other_weights(at, times, monkeypatch):
    evaluate, looked = Ensemble.evaluate, []

    def seen(self, part):
        looked.append(part)
        found = evaluate(self, part)
        good = self.optimizer.done.item() == at
        return torch.full_like(found, 100.0 if good else 0.0) if part == "validation" else found

    monkeypatch.setattr(Ensemble, "evaluate", seen)
    (record,) = train(SequenceTask(sequences(), "softmax", SIZES), recipe=short(test_at_end=True))
    assert looked.count("test") == times and record.selected.at == at and record.last.at == 6


def test_a_killed_run_of_sequences_goes_on_and_its_record_is_read_again(tmp_path):
    recipe = short(test_at_end=True, dropout=0.1)
    task = SequenceTask.of(sequences(), "bn+sh", recipe)
    whole = train(task, recipe=recipe, seeds=[3])[0]
    saves = []

    def killed(training):
        saves.append(training.step)
        if training.step == 3:
            raise KeyboardInterrupt

    first = Training(Ensemble(task, recipe, [3], torch.device("cpu")))
    with pytest.raises(KeyboardInterrupt):
        first.run(save=killed, every=0.0)
    second = Training(Ensemble(task, recipe, [3], torch.device("cpu")))
    second.load(*first.state())
    second.run()
    assert second.history[0] == whole.history
    Store(tmp_path).add(whole)
    assert Store(tmp_path).records() == [whole]


def test_the_model_of_a_run_predicts_what_its_record_says(tmp_path):
    task = SequenceTask(sequences(pairs=True), "sh", SIZES)
    (record,) = train(task, recipe=short(), folder=tmp_path)
    model = Store(tmp_path).model(record.key)
    correct, count = task.score(model, *task.take(task.parts["test"], slice(None)))
    assert float(task.finish(correct, count)) == record.selected.value


def test_a_recipe_of_another_family_is_refused():
    with pytest.raises(ValueError, match="model=SequenceSizes"):
        SequenceTask.of(sequences(), "softmax", Recipe(epochs=1, model=__import__("primaldual").models.SeriesSizes()))


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [False, True], ids=["single", "pairs"])
@pytest.mark.parametrize("name", ["softmax", "bn+sh", "conv1d"])
def test_captured_steps_on_a_gpu_are_plain_ones_on_a_cpu(name, pairs):
    recipe = short(dtype="float32", d_model=16, heads=2, feedforward=16)
    task = SequenceTask.of(sequences(pairs=pairs), name, recipe)
    found = [train(task, recipe=recipe, seeds=[0, 1], device=device) for device in ("cpu", "cuda")]
    for plain, captured in zip(*found, strict=True):
        assert captured.history["loss"] == pytest.approx(plain.history["loss"], rel=2e-3)
    ensemble = Ensemble(task, recipe, [0, 1], torch.device("cuda"))
    for chosen in ensemble.batches.of_epoch(1, [0, 1], ensemble.device):
        ensemble.step(chosen.rows, chosen.length)
    assert ensemble.captured and float(ensemble.evaluate("test").min()) >= 0.0
