"""The engine's way around what cannot be trained."""

import torch

from primaldual.paper import Failure, Place, compare, jobs, local
from training.toy import toy


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
