"""How a model is trained: the settings of the paper's code bases, as values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..data import Dataset
from ..models import SeriesConfig
from ..primal import Primal, Spec
from ..primal._spec import check_choice, check_count, is_number

VERSION = 1
"""To be raised when the same recipe, mechanism, seed and data give another result; finished runs are then run anew."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Recipe(Spec):
    """Model sizes and training; the defaults are those of mvts_transformer.

    Args:
        encoder, d_model, heads, layers, feedforward, dropout, attention_dropout: as in `SeriesConfig`.
        epochs: how many; there is no other end unless `patience` is given.
        batch_size: the last batch of an epoch holds what is left.
        optimizer: "radam" or "adam", with torch's own settings; `learning_rate` is constant.
        clip: the largest norm of a member's gradient.
        dtype: "float32"; "bfloat16", with float32 weights behind it; or "float64".
        evaluate_every: epochs between evaluations; the first and the last are always evaluated.
        validation: share of the training series, stratified, that is held out and never trained on.
        patience: epochs without a better validation metric after which a member stops; 0 for never.
        balanced: whether classes weigh alike in the loss, however many series they have.

    >>> Recipe.from_dict(Recipe(epochs=5).to_dict()) == Recipe(epochs=5)
    True
    """

    encoder: str = "mvts"
    d_model: int = 64
    heads: int = 8
    layers: int = 3
    feedforward: int = 256
    dropout: float = 0.1
    attention_dropout: float | None = None
    epochs: int = 400
    batch_size: int = 64
    optimizer: str = "radam"
    learning_rate: float = 1e-3
    clip: float = 4.0
    dtype: str = "float32"
    evaluate_every: int = 1
    validation: float = 0.0
    patience: int = 0
    balanced: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "evaluate_every"):
            check_count("Recipe", name, getattr(self, name))
        check_count("Recipe", "patience", self.patience, least=0)
        check_choice("Recipe", "optimizer", self.optimizer, ("radam", "adam"))
        check_choice("Recipe", "dtype", self.dtype, tuple(DTYPES))
        for name in ("learning_rate", "clip"):
            if not is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise ValueError(f"Recipe: {name} must be a positive number, got {getattr(self, name)!r}")
        if not is_number(self.validation) or not 0.0 <= self.validation < 1.0:
            raise ValueError(f"Recipe: validation must be a share in [0, 1), got {self.validation!r}")
        if self.patience and not self.validation:
            raise ValueError(
                "Recipe: patience needs a validation share, such as 0.2; the test set is never used for it"
            )

    def model(self, data: Dataset, mechanism: str | Primal) -> SeriesConfig:
        """The model for a data set."""
        return SeriesConfig(
            data.channels, data.length, data.outputs, self.encoder, mechanism, data.kind, self.d_model, self.heads,
            self.layers, self.feedforward, self.dropout, self.attention_dropout,
        )  # fmt: skip

    def evaluates(self, epoch: int) -> bool:
        """Whether the model is evaluated after this epoch, the first of which is 1."""
        return epoch in (1, self.epochs) or epoch % self.evaluate_every == 0


def mvts(**changes: Any) -> Recipe:
    """mvts_transformer: RAdam, batches of 64, 400 epochs; sizes that its paper calls reasonable for all sets."""
    return replace(Recipe(d_model=128, evaluate_every=2), **changes)


def flowformer(**changes: Any) -> Recipe:
    """Flowformer's time-series code: RAdam, batches of 16, 100 epochs, a wide model."""
    return replace(
        Recipe("flowformer", d_model=512, layers=2, feedforward=2048, batch_size=16, epochs=100, evaluate_every=2),
        **changes,
    )  # fmt: skip


_OWN: dict[str, Recipe] = {
    "EthanolConcentration": mvts(layers=1, d_model=64),
    "Handwriting": mvts(layers=1),
    "Heartbeat": mvts(layers=1, d_model=64),
    "SpokenArabicDigits": mvts(d_model=64),
    "PEMS-SF": flowformer(epochs=400),
    "SelfRegulationSCP2": flowformer(),
    "UWaveGestureLibrary": flowformer(),
    "AppliancesEnergy": mvts(epochs=100, feedforward=512),
    "BeijingPM10Quality": mvts(epochs=100, d_model=64),
    "LiveFuelMoistureContent": mvts(epochs=100, d_model=64),
    "IEEEPPG": mvts(epochs=100, d_model=512, feedforward=512),
}
"""The sets whose settings are not those of all."""


def recipe_for(data: Dataset, encoder: str | None = None) -> Recipe:
    """The recipe that the paper's numbers for a set come from; for other sets mvts_transformer's.

    Args:
        data: a set; its name and kind are looked at.
        encoder: "mvts" or "flowformer" where it shall be the general recipe of this one.
    """
    general = mvts(epochs=100 if data.kind == "regression" else 400)
    own = _OWN.get(data.name, general)
    if encoder is None or encoder == own.encoder:
        return own
    check_choice("recipe_for", "encoder", encoder, ("mvts", "flowformer"))
    return general if encoder == "mvts" else flowformer()


def for_cpu(recipe: Recipe) -> Recipe:
    """What a CPU can do in minutes: no dropout on the attention weights, at most 40 epochs.

    torch's fused attention has no dropout on a CPU; with it the weights would be written out.
    """
    return replace(recipe, attention_dropout=0.0, epochs=min(recipe.epochs, 40))
