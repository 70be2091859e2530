"""Small data sets and recipes for the training tests."""

from collections.abc import Sequence

import torch

from primaldual.data import Dataset, Split
from primaldual.models import SeriesSizes
from primaldual.primal import Primal
from primaldual.training import Ensemble, Recipe, SeriesTask

LENGTH, CHANNELS, CLASSES = 12, 3, 3


def part(cases: int, generator: torch.Generator, regression: bool = False, unequal: bool = True) -> Split:
    """Sines whose frequency is the class, or the target; noisy, of unequal lengths."""
    drawn = torch.rand(cases, generator=generator) * CLASSES
    y = drawn if regression else drawn.long()
    steps = torch.arange(LENGTH)[:, None] * (1 + y[:, None, None]) / 3
    x = torch.sin(steps + torch.arange(CHANNELS)) + 0.1 * torch.randn(cases, LENGTH, CHANNELS, generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (cases,), generator=generator)
    lengths[0] = LENGTH
    if not unequal:
        lengths[:] = LENGTH
    x = x.masked_fill((torch.arange(LENGTH) >= lengths[:, None]).unsqueeze(-1), 0.0)
    return Split(x, lengths, y)


def toy(cases: int = 22, test: int = 10, *, regression: bool = False, unequal: bool = True, seed: int = 0) -> Dataset:
    """A data set that needs no file."""
    generator = torch.Generator().manual_seed(seed)
    train, rest = part(cases, generator, regression, unequal), part(max(test, 1), generator, regression, unequal)
    if not test:
        rest = Split(rest.x[:0], rest.lengths[:0], rest.y[:0])
    kind = "regression" if regression else "classification"
    classes = () if regression else tuple("abc")
    one = torch.ones(CHANNELS, dtype=torch.float64)
    return Dataset("Toy", kind, classes, train, rest, 0 * one, one, LENGTH)


def small(**changes) -> Recipe:
    """A recipe of milliseconds: exact, without dropout, with a last batch that is not full."""
    recipe = Recipe(SeriesSizes(d_model=16, layers=2, feedforward=24, dropout=0.0), epochs=2, batch_size=8)
    return recipe.having(**{"dtype": "float64"} | changes)


def members(
    data: Dataset, mechanism: str | Primal, recipe: Recipe, seeds: Sequence[int], device: str = "cpu"
) -> Ensemble:
    """Of time series, at their start."""
    return Ensemble(SeriesTask.of(data, mechanism, recipe), recipe, seeds, torch.device(device))
