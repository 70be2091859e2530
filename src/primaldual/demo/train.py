"""One training run: a fixed number of epochs, nothing selected on the test set."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..primal import Primal
from .data import Data
from .heads import head_distance, head_maps
from .model import SeriesTransformer
from .recipe import SHOWN, Recipe


class Job(NamedTuple):
    """What to train."""

    mechanism: str
    primal: Primal
    seed: int


class Run(NamedTuple):
    """What came of it; losses and accuracies (test, in percent) are per epoch, `seconds` is CPU time of training."""

    mechanism: str
    primal: Primal
    seed: int
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    seconds: float
    parameters: int
    head_distance: float
    maps: Tensor
    """Of the series that is shown, [layers, heads, length, length]."""

    @property
    def accuracy(self) -> float:
        """After the last epoch."""
        return self.accuracies[-1]


def build(primal: Primal, data: Data, recipe: Recipe, seed: int) -> SeriesTransformer:
    """A model with the initial weights of a seed; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _, length, channels = data.train.shape
        return SeriesTransformer(primal, recipe, channels=channels, length=length, classes=len(data.classes))


def train(job: Job, data: Data, recipe: Recipe) -> Run:
    """Train for `recipe.epochs` epochs with RAdam and gradient clipping."""
    model = build(job.primal, data, recipe, job.seed)
    optimizer = torch.optim.RAdam(model.parameters(), lr=recipe.learning_rate)
    order = torch.Generator().manual_seed(job.seed)
    losses, accuracies, seconds = [], [], 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)  # dropout
        for _ in range(recipe.epochs):
            start = time.process_time()  # a busy machine does not change it much
            losses.append(_epoch(model, optimizer, data, recipe, order))
            seconds += time.process_time() - start
            accuracies.append(_accuracy(model, data))
    maps = head_maps(model, data.test)  # the last evaluation left the model in eval mode
    return Run(
        job.mechanism, job.primal, job.seed, tuple(losses), tuple(accuracies), seconds,
        sum(p.numel() for p in model.parameters()), head_distance(maps), maps[:, data.first(SHOWN)].clone(),
    )  # fmt: skip


def _epoch(
    model: SeriesTransformer, optimizer: torch.optim.Optimizer, data: Data, recipe: Recipe, order: torch.Generator
) -> float:
    """One pass over the training set; the mean loss per series."""
    model.train()
    total = 0.0
    for rows in torch.randperm(len(data.train), generator=order).split(recipe.batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.train[rows]), data.train_labels[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        total += loss.item() * len(rows)
    return total / len(data.train)


@torch.no_grad()
def _accuracy(model: SeriesTransformer, data: Data) -> float:
    """Percent of the test series."""
    model.eval()
    hits = model(data.test).argmax(-1) == data.test_labels
    return 100.0 * int(hits.sum()) / len(hits)
