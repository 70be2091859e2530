"""The settings that the paper's numbers come from: those of its code bases, set by set."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..data import Dataset
from ..models import SequenceSizes, SeriesSizes
from ..primal._spec import check_choice
from ..training import OneCycle, Recipe, series_recipe


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


class _Steps(NamedTuple):
    """Of a task of the Long Range Arena: steps in all, of the rise of the learning rate, and between evaluations."""

    all: int
    rise: int
    evaluate: int
    batch: int = 32


_LONG = {
    "listops": _Steps(5_000, 1_000, 50),
    "text": _Steps(20_000, 8_000, 500),
    "retrieval": _Steps(30_000, 800, 300),
    "image": _Steps(35_000, 175, 175, 256),
    "pathfinder": _Steps(62_400, 312, 312, 256),
}


def long_range(name: str, **changes: Any) -> Recipe:
    """Nystromformer's settings for a task of the Long Range Arena, which the paper's softmax numbers are closest to.

    AdamW without decay or clipping, one cycle of the learning rate, and of β₁ with it as torch's `OneCycleLR` has it
    unless told otherwise; dropout 0.1; the weights are those of the best evaluation on validation. In bfloat16, where
    that code has float16 and a scale for the loss; batches are of similar lengths, where that code pads all to one.

    >>> long_range("lra-image").schedule.rise
    0.005
    """
    steps = _LONG[name.removeprefix("lra-").partition("-")[0]]
    schedule = OneCycle(rise=steps.rise / steps.all, anneal="linear")
    recipe = Recipe(
        SequenceSizes(), steps=steps.all, batch_size=steps.batch, optimizer="adamw", learning_rate=1e-4, eps=1e-6,
        schedule=schedule, clip=None, dtype="bfloat16", evaluate_every=steps.evaluate, test_at_end=True,
    )  # fmt: skip
    return recipe.having(**changes)


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
