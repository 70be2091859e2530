"""The settings that the paper's numbers come from: those of its code bases, set by set."""

from __future__ import annotations

from typing import Any

from ..data import Dataset
from ..models import SeriesSizes
from ..primal._spec import check_choice
from ..training import Recipe, series_recipe


def mvts(**changes: Any) -> Recipe:
    """mvts_transformer: RAdam, batches of 64, 400 epochs; sizes that its paper calls reasonable for all sets."""
    return series_recipe(**changes)


def flowformer(**changes: Any) -> Recipe:
    """Flowformer's time-series code: RAdam, batches of 16, 100 epochs, a wide model."""
    sizes = SeriesSizes("flowformer", d_model=512, layers=2, feedforward=2048)
    return Recipe(sizes, epochs=100, batch_size=16, evaluate_every=2).having(**changes)


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
    general = series_recipe(data.kind)
    own = _OWN.get(data.name, general)
    if encoder is None or encoder == sizes_of(own).encoder:
        return own
    check_choice("recipe_for", "encoder", encoder, ("mvts", "flowformer"))
    return general if encoder == "mvts" else flowformer()


def sizes_of(recipe: Recipe) -> SeriesSizes:
    """The sizes of a recipe for time series."""
    if not isinstance(recipe.model, SeriesSizes):
        raise ValueError(f"a recipe for time series has model=SeriesSizes(…), got {recipe.model!r}")
    return recipe.model
