"""What an estimator's `recipe` stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..data import Dataset
from ..models import SeriesSizes
from ..primal import Primal, as_primal
from ..training import ModernRecipe, Recipe, in_minutes, series_recipe

Given = ModernRecipe | Recipe | Literal["modern", "paper"] | None
PAPER = "bn+sh"
"""The mechanism that the paper's recipe has unless one is given."""


def modern_recipe(
    recipe: Given, mechanism: str | Primal | None, n_members: int | None, classifies: bool
) -> ModernRecipe | None:  # fmt: skip
    """The modern recipe that is meant, with this mechanism and so many members; None where it is the paper's.

    That of regressions has members where a mechanism or a number of them is given.
    """
    if recipe is not None and not isinstance(recipe, ModernRecipe | Recipe) and recipe not in ("modern", "paper"):
        raise ValueError(f"recipe takes 'modern', 'paper', a ModernRecipe or a Recipe; got {recipe!r}")
    if isinstance(recipe, Recipe) or recipe == "paper":
        return None
    usual = ModernRecipe() if classifies else ModernRecipe.for_regression()
    made = recipe if isinstance(recipe, ModernRecipe) else usual
    if made is usual and not made.members and (mechanism is not None or n_members is not None):
        made = replace(made, members=ModernRecipe().members)
    if mechanism is not None:
        made = replace(made, mechanism=as_primal(mechanism))
    if n_members is not None:
        if not made.members:
            raise ValueError(f"the recipe has no members of which there could be {n_members}; leave out n_members")
        made = replace(made, members=tuple(made.members[i % len(made.members)] for i in range(n_members)))
    return made


def paper_recipe(recipe: Given, data: Dataset) -> Recipe:
    """The paper's: as it is given, or what is done of it in minutes."""
    if isinstance(recipe, Recipe):
        return recipe if recipe.model is not None else replace(recipe, model=SeriesSizes())
    # batches of 64 would be one step per epoch for many a set: too few in 40 epochs
    size = min(64, max(8, len(data.train) // 8))
    kind = "classification" if data.classes else "regression"
    return replace(in_minutes(series_recipe(kind)), batch_size=size, evaluate_every=1)
