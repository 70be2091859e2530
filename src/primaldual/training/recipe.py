"""How a model is trained, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ..primal import Spec
from ..primal._spec import check_choice, check_count, is_number
from .optimizer import OPTIMIZERS
from .schedule import Constant, Schedule

VERSION = 1
"""To be raised when the same recipe, mechanism, seed and data give another result; finished runs are then run anew."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Recipe(Spec):
    """What is trained in which size, for how long, and how; the defaults are those of mvts_transformer.

    Args:
        model: sizes, as a value of the model's family, such as `SeriesSizes`; None for a task whose model has none.
        epochs, steps: how long; one of them is given. There is no other end unless `patience` is given.
        batch_size: the last batch of an epoch holds what is left.
        accumulate: parts of a batch that are computed one after the other; the gradient is that of the whole batch.
            Batch norm sees a part at a time.
        optimizer: "radam", "adam" or "adamw", with torch's own settings.
        learning_rate, schedule: of every step: `Constant`, `Cosine`, `Linear` or `OneCycle`.
        weight_decay: of "adamw", on the parameters that the task says it is for.
        eps: what the optimiser adds to the root of the mean square.
        square_beta: β₂, the share of itself that the optimiser's mean square keeps.
        clip: the largest norm of a member's gradient; None for any.
        dtype: "float32"; "bfloat16", with float32 weights behind it; or "float64".
        evaluate_every: epochs (or steps) between evaluations; the first and the last are always evaluated.
        test_at_end: whether the test part waits for the end of the training, where it is evaluated with the last
            weights and with those that validation chose.
        validation: share of the training cases, stratified where they have classes, that is held out and never trained
            on. Weights are then those of the best evaluation on it, and so they are where a task has such a part.
        patience: epochs (or steps) without a better validation metric after which a member stops; 0 for never.
        balanced: whether classes weigh alike in the loss, however many cases they have.
        lengths: where cases have lengths of their own: to how many lengths batches are cut.

    >>> Recipe.from_dict(Recipe(epochs=5).to_dict()) == Recipe(epochs=5)
    True
    """

    model: Spec | None = None
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 64
    accumulate: int = 1
    optimizer: str = "radam"
    learning_rate: float = 1e-3
    schedule: Schedule = field(default_factory=Constant)
    weight_decay: float = 0.0
    eps: float = 1e-8
    clip: float | None = 4.0
    dtype: str = "float32"
    evaluate_every: int = 1
    test_at_end: bool = False
    validation: float = 0.0
    patience: int = 0
    balanced: bool = False
    lengths: int = 4
    square_beta: float = 0.999

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, Spec):
            raise ValueError(f"Recipe: model must be sizes such as SeriesSizes(d_model=128), got {self.model!r}")
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"Recipe: give epochs or steps, got epochs={self.epochs!r} and steps={self.steps!r}")
        for name in (self.unit + "s", "batch_size", "accumulate", "evaluate_every", "lengths"):
            check_count("Recipe", name, getattr(self, name))
        check_count("Recipe", "patience", self.patience, least=0)
        check_choice("Recipe", "optimizer", self.optimizer, OPTIMIZERS)
        check_choice("Recipe", "dtype", self.dtype, tuple(DTYPES))
        if not isinstance(self.schedule, Schedule):
            raise ValueError(f"Recipe: schedule must be one such as Cosine(warmup=100), got {self.schedule!r}")
        for name in ("learning_rate", "eps", "clip"):
            value = getattr(self, name)
            if (value is not None or name != "clip") and (not is_number(value) or not 0 < value < math.inf):
                raise ValueError(f"Recipe: {name} must be a positive number, got {value!r}")
        if not is_number(self.weight_decay) or self.weight_decay < 0:
            raise ValueError(f"Recipe: weight_decay must be a number of at least 0, got {self.weight_decay!r}")
        if self.weight_decay and self.optimizer != "adamw":
            raise ValueError(f"Recipe: weight_decay is of optimizer 'adamw', got {self.optimizer!r}")
        if not is_number(self.validation) or not 0.0 <= self.validation < 1.0:
            raise ValueError(f"Recipe: validation must be a share in [0, 1), got {self.validation!r}")
        if not is_number(self.square_beta) or not 0.0 < self.square_beta < 1.0:
            raise ValueError(f"Recipe: square_beta must be in (0, 1), got {self.square_beta!r}")
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"Recipe: a batch of {self.batch_size} cannot be divided into {self.accumulate} parts; give a smaller "
                f"accumulate"
            )

    @property
    def unit(self) -> str:
        """What the training is counted in: "epoch" or "step"."""
        return "epoch" if self.steps is None else "step"

    @property
    def end(self) -> int:
        """So many epochs, or steps, there are."""
        found = self.epochs if self.steps is None else self.steps
        assert found is not None
        return found

    def evaluates(self, at: int) -> bool:
        """Whether the model is evaluated after this epoch, or step, the first of which is 1."""
        return at in (1, self.end) or at % self.evaluate_every == 0

    def having(self, **changes: Any) -> Recipe:
        """This recipe with other settings; those that are sizes go to the model.

        >>> from primaldual.models import SeriesSizes
        >>> Recipe(SeriesSizes(), epochs=5).having(d_model=32, batch_size=8).model.d_model
        32
        """
        own = {f.name for f in fields(self)}
        sizes = {name: value for name, value in changes.items() if name not in own}
        if sizes:
            known = () if self.model is None else tuple(f.name for f in fields(self.model))
            if unknown := sorted(set(sizes) - set(known)):
                raise ValueError(f"neither the recipe nor its model has {unknown}; they have {sorted({*own, *known})}")
            assert self.model is not None
            changes = {name: value for name, value in changes.items() if name in own}
            changes["model"] = replace(changes.get("model", self.model), **sizes)
        return replace(self, **changes)


_FIRST = (
    "kind", "model", "epochs", "batch_size", "optimizer", "learning_rate", "clip", "dtype", "evaluate_every",
    "validation", "patience", "balanced",
)  # fmt: skip
"""What a recipe's JSON had at first; what came later is in a key where it is not at its default."""


def canonical(recipe: Recipe) -> dict[str, Any]:
    """A recipe as it enters a key."""
    default = Recipe(epochs=1).to_dict()
    data = {name: x for name, x in recipe.to_dict().items() if name in _FIRST or x != default[name]}
    return data if recipe.model is not None else {name: x for name, x in data.items() if name != "model"}


def completed(data: dict[str, Any]) -> dict[str, Any]:
    """A recipe's JSON with all that there is by now."""
    return {name: x for name, x in Recipe(epochs=1).to_dict().items() if name not in ("kind", "epochs")} | data
