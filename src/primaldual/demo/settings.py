"""What the demo runs: the data set, the mechanisms, and the training that all of them share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..data import Dataset
from ..models import SeriesConfig, SeriesSizes
from ..paper import table
from ..paper.job import as_in_paper
from ..paper.numbers import BETAS
from ..paper.recipes import sizes_of
from ..primal import Primal
from ..training import Recipe

DATASET = "BasicMotions"
"""40 training and 40 test series of 6 channels and 100 steps, four activities; shipped inside aeon."""

SHOWN = "walking"
"""The class whose first test series is shown in the attention maps."""

NAMES = ("softmax", "bn", "sh", "bn+sh")
PAPER = {name: printed for name in NAMES if (printed := table("table-uea-more").printed(DATASET, name))}
"""Accuracy as the paper reports it, mean and std in percent (Table more-uea-classification)."""

BETA = BETAS["softmax"][DATASET][0]
"""β of BN and of BN+SH: the paper's value for this set."""

TRAINING = Recipe(SeriesSizes("flowformer", layers=2, feedforward=128, attention_dropout=0.0), epochs=1, batch_size=10)
"""Of every model, but for the epochs: small enough for minutes; LayerNorm, as batches of 10 tell BatchNorm little; no
dropout on the attention weights, which torch's fused attention lacks on a CPU."""


class DemoError(RuntimeError):
    """The demo cannot run or must not go on; `status` is the exit status of the command."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Settings:
    """One demo.

    Args:
        seeds: models per mechanism, with seeds 0, 1, …
        epochs: of each; the accuracy reported is that of the last one.
        sweep: the β of the sweep beside 0 (softmax) and the β of `bn`; each is trained with `sweep_seeds` seeds.
        budget: seconds to stay within: as many seeds are trained as fit, one at least.
        training: of every model, but for the epochs.
    """

    seeds: int = 5
    epochs: int = 20
    sweep: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    sweep_seeds: int = 3
    budget: float = 150.0
    training: Recipe = TRAINING

    @property
    def recipe(self) -> Recipe:
        """Of every model."""
        return replace(self.training, epochs=self.epochs)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; no limit on time is None."""
        return asdict(self) | {
            "sweep": list(self.sweep),
            "budget": None if self.budget == float("inf") else self.budget,
            "training": self.recipe.to_dict(),
        }


def model_config(recipe: Recipe, data: Dataset, primal: Primal) -> SeriesConfig:
    """The model of a mechanism."""
    return sizes_of(recipe).config(data, primal)


def family() -> dict[str, Primal]:
    """The four softmax-family mechanisms with the paper's settings for this set."""
    return {name: as_in_paper(DATASET, name) for name in NAMES}
