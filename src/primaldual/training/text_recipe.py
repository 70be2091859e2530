"""How a language model is trained unless told otherwise."""

from __future__ import annotations

from typing import Any

from ..base.suggestions import did_you_mean
from ..models import LANGUAGE_SIZES
from .recipe import Recipe
from .schedule import Cosine

RATES = {"tiny": 3e-3, "small": 1e-3, "medium": 8e-4, "large": 6e-4, "xlarge": 3e-4}
"""The highest learning rate of each size."""


def text_recipe(size: str = "small", **changes: Any) -> Recipe:
    """AdamW (β₂ 0.95, decay 0.1 of matrices) over 1,500 batches of 32 windows, in bfloat16.

    The learning rate rises over a fifteenth of the steps and falls on half a cosine to a tenth; gradients are cut to
    norm 1. Validation is looked at every 100 steps; the test waits for the end, where the last weights are evaluated,
    and those that did best on validation.

    Args:
        size: one of `LANGUAGE_SIZES`.
        changes: to the recipe, or to the sizes of the model.

    >>> text_recipe("large", steps=300).schedule.warmup, text_recipe(context=128).model.context
    (20, 128)
    """
    if size not in LANGUAGE_SIZES:
        raise ValueError(
            f"unknown size {size!r}{did_you_mean(size, LANGUAGE_SIZES)} There are: {', '.join(LANGUAGE_SIZES)}"
        )
    steps = changes.pop("steps", 1500)
    recipe = Recipe(
        LANGUAGE_SIZES[size], steps=steps, batch_size=32, optimizer="adamw", learning_rate=RATES[size],
        schedule=Cosine(warmup=steps // 15, floor=0.1), weight_decay=0.1, clip=1.0, dtype="bfloat16",
        evaluate_every=100, test_at_end=True, square_beta=0.95,
    )  # fmt: skip
    return recipe.having(**changes)
