"""The recipe for people: a bank of prototypes with solved values, and small transformers, predicting together."""

from __future__ import annotations

from dataclasses import dataclass

from ..data import Dataset
from ..models import BankSizes, PatternSizes
from ..primal import Primal, Spec, as_primal
from .augmentation import Augmentation
from .recipe import Recipe
from .schedule import Cosine

BANKS = (BankSizes(prototypes=2048, energy=True), BankSizes(windows=0.5), BankSizes(level=0.7))
"""Random shapes and how near they come; shapes of training series; shapes that know the level of a series."""
LEAST_STEPS = 20
"""Of a member, however large its series are."""


@dataclass(frozen=True)
class ModernRecipe(Spec):
    """How series are learned by default.

    Args:
        banks: of prototypes whose values ridge regression solves for, one each: different ones see different things. ()
            for none.
        members: sizes of the transformers, one each: different stems see different things. () for none.
        mechanism: of their attention, or its name.
        share: of the transformers in the prediction, where there are both.
        augmentation, smoothing: as in `PatternTask`.
        steps: of gradient descent at most.
        passes: times that each series is seen at most: small sets have fewer steps than `steps`.
        work: products at most, in billions, in the training of one member: large series have fewer steps.
        batch_size, learning_rate, weight_decay, warmup, clip: of every member; the rate goes down by half a cosine,
            after a warm-up of this share of the steps.
        calibration: share of the training series on which probabilities are calibrated: one more member is trained
            without them, for half as many steps, and does not predict. 0 for no such member.

    >>> ModernRecipe.from_dict(ModernRecipe().to_dict()) == ModernRecipe()
    True
    """

    banks: tuple[BankSizes, ...] = BANKS
    members: tuple[PatternSizes, ...] = (PatternSizes(),)
    mechanism: str | Primal = "softmax"
    share: float = 0.5
    augmentation: Augmentation = Augmentation()
    smoothing: float = 0.1
    steps: int = 400
    passes: int = 400
    work: float = 700.0
    batch_size: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.1
    clip: float = 2.0
    calibration: float = 0.2

    def __post_init__(self) -> None:
        for name in ("banks", "members"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "mechanism", as_primal(self.mechanism))
        if not self.banks and not self.members:
            raise ValueError("ModernRecipe: give banks, members, or both")
        if not 0 <= self.share <= 1:
            raise ValueError(f"ModernRecipe: share must be in [0, 1], got {self.share!r}")
        if not 0 <= self.calibration <= 0.5:
            raise ValueError(f"ModernRecipe: calibration must be in [0, 0.5], got {self.calibration!r}")

    @classmethod
    def for_regression(cls) -> ModernRecipe:
        """Banks alone, which predict numbers with less error than members do; with members, these have less to say."""
        return cls(members=(), share=0.25)

    def training(self, data: Dataset, sizes: PatternSizes) -> Recipe:
        """How one member is trained on a set: as many steps as its size allows."""
        batch = min(self.batch_size, len(data.train))
        products = 3e-9 * batch * sizes.config(data).products
        steps = min(self.steps, self.passes * len(data.train) // batch, int(self.work / products))
        return self.of_steps(max(LEAST_STEPS, steps), data, sizes)

    def of_steps(self, steps: int, data: Dataset, sizes: PatternSizes) -> Recipe:
        """The same for so many steps; what it comes to is said once an epoch."""
        batch = min(self.batch_size, len(data.train))
        return Recipe(
            sizes, steps=steps, batch_size=batch, optimizer="adamw", learning_rate=self.learning_rate,
            schedule=Cosine(max(1, round(self.warmup * steps))), weight_decay=self.weight_decay, clip=self.clip,
            evaluate_every=-(-len(data.train) // batch),
        )  # fmt: skip
