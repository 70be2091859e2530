"""Recipes for time series: the general one, what is done of it in minutes, and how keys and old records have them.

At first recipes were of time series alone, with the sizes of the model side by side with the rest. Keys of time series
are still written so, that runs of before are found.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ..models import SeriesSizes
from .recipe import Recipe, canonical

_SIZES = tuple(f.name for f in fields(SeriesSizes))


def series_recipe(kind: str = "classification", **changes: Any) -> Recipe:
    """mvts_transformer's, in sizes that its paper calls reasonable for all sets: 400 epochs, 100 for regression.

    >>> series_recipe(epochs=3).epochs
    3
    """
    recipe = Recipe(SeriesSizes(d_model=128), epochs=100 if kind == "regression" else 400, evaluate_every=2)
    return recipe.having(**changes)


def in_minutes(recipe: Recipe) -> Recipe:
    """What two cores can do in minutes: no dropout on a series model's attention weights, at most 40 epochs.

    torch's fused attention has no dropout on a CPU; with it the weights would be written out. It is the same on every
    device, so that a model does not depend on where it was trained.
    """
    if isinstance(recipe.model, SeriesSizes):
        recipe = recipe.having(attention_dropout=0.0)
    return recipe if recipe.epochs is None else replace(recipe, epochs=min(recipe.epochs, 40))


def side_by_side(recipe: Recipe) -> dict[str, Any]:
    """A recipe as it enters a key of time series: the sizes of the model side by side with the rest."""
    data = canonical(recipe)
    return data.pop("model", {}) | data


def nested(data: dict[str, Any]) -> dict[str, Any]:
    """A recipe's JSON with the model as one value, also where its sizes are side by side with the rest."""
    if "encoder" not in data:
        return data
    sizes = {"kind": SeriesSizes.kind()} | {name: data[name] for name in _SIZES}
    return {"model": sizes} | {name: value for name, value in data.items() if name not in _SIZES}
