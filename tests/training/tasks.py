"""Tasks of one's own for the training tests: milliseconds, and everything that a model can have."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from primaldual.training import Metric, Recipe, Task


class Sums(Task):
    """The sum of some numbers, by a model with batch norm, dropout, a fixed weight and one that is used twice."""

    name, metric = "sums", Metric("mse", more_is_better=False)

    def __init__(self, p: float = 0.0, validation: bool = False, norm: bool = True, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(40, 6, generator=draw, dtype=torch.float64)
        y = x.sum(1)
        self.parts = {"train": (x[:22], y[:22]), "test": (x[22:32], y[22:32])}
        if validation:
            self.parts["validation"] = (x[32:], y[32:])
        self.p, self.norm = p, norm

    def build(self) -> nn.Module:
        norm = nn.BatchNorm1d(8, momentum=None) if self.norm else nn.LayerNorm(8)  # momentum None counts batches
        first, last = nn.Linear(8, 8), nn.Linear(8, 8)
        last.weight = first.weight
        model = nn.Sequential(nn.Linear(6, 8), norm, nn.Dropout(self.p), first, nn.Tanh(), last, nn.Linear(8, 1))
        model[0].bias.requires_grad_(False)
        return model

    def loss(self, model, x, y):
        return mse_loss(model(x).squeeze(-1), y)


class Words(Task):
    """Whether there are more ones than zeros in a row of bits, whose length differs; a loss that is a sum."""

    name, metric = "words", Metric("accuracy", more_is_better=True)

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self._lengths = {"train": torch.randint(3, 13, (30,), generator=draw)}
        self._lengths["test"] = torch.randint(3, 13, (11,), generator=draw)
        self.parts = {}
        for part, lengths in self._lengths.items():
            bits = torch.randint(0, 2, (len(lengths), 12), generator=draw)
            hidden = torch.arange(12) >= lengths[:, None]
            bits[hidden] = 2
            y = ((bits == 1).sum(1) > (bits == 0).sum(1)).long()
            self.parts[part] = (bits, y)

    def build(self) -> nn.Module:
        return nn.ModuleDict({"embed": nn.Embedding(3, 8, padding_idx=2), "head": nn.Linear(8, 2)})

    def scores(self, model: nn.Module, bits: Tensor) -> Tensor:
        return model["head"](model["embed"](bits).tanh().sum(1))

    def loss(self, model, bits, y):
        weight = (1 + y).double()
        each = cross_entropy(self.scores(model, bits), y, reduction="none")
        return (each * weight).sum(), weight.sum()

    def score(self, model, bits, y):
        return (self.scores(model, bits).argmax(-1) == y).sum(), len(y)

    def finish(self, total, count):
        return 100 * total / count

    def lengths(self, part: str) -> Tensor:
        return self._lengths[part]


def quick(**changes) -> Recipe:
    """Exact, with a last batch that is not full."""
    settings = {"batch_size": 8, "dtype": "float64", "optimizer": "adam", "learning_rate": 1e-2, "clip": None}
    settings |= {} if "steps" in changes else {"epochs": 3}
    return Recipe(**settings | changes)
