"""The engine's way around what cannot be trained."""

import torch

from primaldual.paper import Failure, Place, local, report, runs
from training.toy import toy


def test_a_run_without_memory_does_not_stop_the_others(tmp_path, monkeypatch):
    trained = []

    def train(data, primal, *_, **__):
        if primal.inputs:
            raise torch.OutOfMemoryError
        trained.append(primal)

    monkeypatch.setattr("primaldual.paper.engine.load", lambda *_, **__: toy())
    monkeypatch.setattr("primaldual.paper.engine.train", train)
    found = local(runs("table-uea", ["PEMS-SF"]), Place(tmp_path))
    message = "the device is out of memory"
    assert found == [Failure("PEMS-SF", "bn", message), Failure("PEMS-SF", "bn+sh", message)]
    assert len(trained) == 2
    notes = report("table-uea", [], ["PEMS-SF"], ["bn"], failures=found).notes
    assert notes == (f"not run: PEMS-SF, bn, seeds 0, 1, 2, 3, 4: {message}",)
