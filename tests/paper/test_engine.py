"""The engine's way around what cannot be trained."""

from contextlib import ExitStack
from dataclasses import replace

import torch

from primaldual.base.leases import holding
from primaldual.base.tensors import write
from primaldual.paper import Failure, Place, compare, jobs, local
from primaldual.paper.families import LONG
from primaldual.training import Ensemble, SeriesTask, Store, Training, key
from training.sequences import sequences
from training.toy import small, toy


def test_a_run_without_memory_does_not_stop_the_others(tmp_path, monkeypatch):
    trained = []

    def train(task, *_, **__):
        if task.mechanism.inputs:
            raise torch.OutOfMemoryError
        trained.append(task.mechanism)

    monkeypatch.setattr("primaldual.paper.families.load", lambda *_, **__: toy())
    monkeypatch.setattr("primaldual.paper.engine.train", train)
    found = local(jobs("table-uea", ["PEMS-SF"]), Place(tmp_path))
    message = "the device is out of memory"
    assert found == [Failure("PEMS-SF", "bn", message), Failure("PEMS-SF", "bn+sh", message)]
    assert len(trained) == 2
    notes = compare("table-uea", [], ["PEMS-SF"], ["bn"], failures=found).notes
    assert notes == (f"not run: PEMS-SF, bn, seeds 0, 1, 2, 3, 4: {message}",)


def test_a_checkpoint_of_long_sequences_fits_into_16_mebibytes(tmp_path, monkeypatch):
    recipe = jobs("table-lra", ["lra-retrieval"])[0].recipe.having(dtype="float32", batch_size=4)
    task = LONG.task(sequences(pairs=True, length=4096), "bn+sh", recipe)
    together = LONG.together(task)
    training = Training(Ensemble(task, recipe, range(together), torch.device("cpu")))
    tensors, about = training.state()
    write(tmp_path / "checkpoint", tensors, about)
    assert (
        together == 2
        and (tmp_path / "checkpoint").stat().st_size < 16 * 2**20 < 1.5 * (tmp_path / "checkpoint").stat().st_size
    )


def test_what_another_process_trains_is_left_to_it_and_waited_for_at_the_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("primaldual.paper.families.load", lambda *_, **__: toy())
    wanted = [replace(job, recipe=small(epochs=1)) for job in jobs("table-uea", ["PEMS-SF"], ["softmax", "bn"], (0,))]
    first, order, step = wanted[0], [], Ensemble.step
    lease = Store(tmp_path).lease(key(SeriesTask.of(toy(), first.primal, first.recipe), first.recipe, 0))
    with ExitStack() as elsewhere:

        def seen(self, *given):
            order.append(len(self.task.mechanism.inputs))
            elsewhere.close()
            step(self, *given)

        monkeypatch.setattr(Ensemble, "step", seen)
        elsewhere.enter_context(holding([lease]))
        with caplog.at_level("WARNING"):
            assert local(wanted, Place(tmp_path)) == []
    assert order == sorted(order, reverse=True) and len(Store(tmp_path).records()) == 2
    assert "PEMS-SF, softmax: process" in caplog.text and "on with the next" in caplog.text


def test_seeds_of_long_sequences_train_in_groups(tmp_path, monkeypatch):
    groups = []
    monkeypatch.setattr(LONG, "load", lambda *_: sequences(length=4096))
    monkeypatch.setattr("primaldual.paper.engine.train", lambda task, primal, recipe, seeds, **_: groups.append(seeds))
    assert local(jobs("table-lra", ["lra-text"], ["sh"]), Place(tmp_path)) == []
    assert groups == [(0, 1), (2, 3), (4,)]
