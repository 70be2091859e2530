"""A task of one's own, in one small class: trained with several seeds, recorded, resumed; nothing in the library knows
of it."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from primaldual import MultiheadAttention
from primaldual.training import Cosine, Metric, Recipe, Store, Task, Training, train

TEXT = torch.tensor(list(b"the duck ducks, the dock docks, and the deck decks. " * 12))
CONTEXT = 16


class Next(nn.Module):
    """The next byte from those before it, by one layer of attention."""

    def __init__(self, mechanism: str) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(128, 32), nn.Parameter(0.02 * torch.randn(CONTEXT, 32))
        self.attention = MultiheadAttention(32, 4, batch_first=True, mechanism=mechanism)
        self.head = nn.Linear(32, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.positions
        return self.head(x + self.attention(x, x, x, is_causal=True, need_weights=False)[0])


class Bytes(Task):
    """The next byte of a text, in bits."""

    name, metric = "bytes", Metric("bits per byte", more_is_better=False)

    def __init__(self, mechanism: str = "softmax") -> None:
        windows = TEXT.unfold(0, CONTEXT + 1, 4)
        self.mechanism, self.parts = mechanism, {"train": (windows[:-24],), "test": (windows[-24:],)}

    def build(self) -> nn.Module:
        return Next(self.mechanism)

    def loss(self, model, windows):
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def finish(self, total, count):
        return total / count / math.log(2)


RECIPE = Recipe(steps=60, batch_size=16, optimizer="adamw", learning_rate=1e-2, schedule=Cosine(5), evaluate_every=20)


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_it_learns_with_two_seeds_and_is_recorded(mechanism, tmp_path):
    task, seen = Bytes(mechanism), []
    records = train(task, recipe=RECIPE, seeds=(0, 1), folder=tmp_path, watch=[seen.append])
    for record in records:
        assert (record.metric, record.unit, record.last.at, record.members) == ("bits per byte", "step", 60, [0, 1])
        assert record.last.value < 2.0 < record.history["test"][0]
    assert [one.done for one in seen if one.values] == [1, 20, 40, 60]
    model = Store(tmp_path).load_model(records[0].key, task)
    with torch.no_grad():
        found = task.loss(model, *task.parts["test"]).item() / math.log(2)
    assert found == pytest.approx(records[0].last.value, rel=1e-5)
    assert train(task, recipe=RECIPE, seeds=(0, 1), folder=tmp_path) == records


def test_interrupted_it_goes_on_and_ends_the_same(tmp_path, monkeypatch):
    expected = train(Bytes(), recipe=RECIPE, seeds=(0, 1))
    train_batch = Training.train_batch

    def interrupted(self):
        if self.step == 30:
            raise KeyboardInterrupt
        train_batch(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "train_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(Bytes(), recipe=RECIPE, seeds=(0, 1), folder=tmp_path, every=0.0)
    resumed = train(Bytes(), recipe=RECIPE, seeds=(0, 1), folder=tmp_path)
    assert [record.history for record in resumed] == [record.history for record in expected]


def test_other_mechanisms_are_other_runs(tmp_path):
    short = Recipe(steps=1)
    keys = {train(Bytes(name), recipe=short, folder=tmp_path)[0].key for name in ("softmax", "linear", "sparse")}
    assert len(keys) == 3
