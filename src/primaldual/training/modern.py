"""The recipe for people: a bank of prototypes with solved values, and small transformers, predicting together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from ..data import Dataset, Split
from ..models import BankSizes, PatternSizes, PrototypeBank
from ..primal import Primal, Spec, as_primal
from ..svr.ridge import ALPHAS, Ridge, ridge
from .augmentation import Augmentation
from .ensemble import Ensemble
from .loop import Training
from .patterns import PatternTask
from .progress import Watch
from .recipe import Recipe
from .schedule import Cosine
from .series import series_tensors

PREDICTED, CACHED = 1 << 15, 1 << 10
"""Steps that are predicted from at once; and by a bank on a CPU."""
TEMPERATURES = tuple(2.0 ** (i / 2) for i in range(-2, 13))
"""What the scores of a regression on ±1 are multiplied by before a softmax: the best on left-out cases is taken."""
FEATURES, LEAST = 20_000_000, 256
"""Of all training series together: where those are many there are fewer prototypes, but no fewer than LEAST."""
SHRUNK = 1e-2
"""The largest penalty of each feature where there are classes."""


@dataclass(frozen=True)
class ModernRecipe(Spec):
    """How series are learned by default.

    Args:
        bank: of prototypes whose values ridge regression solves for; None for none.
        banks: so many, each drawn anew.
        members: sizes of the transformers, one each: different stems see different things. () for none.
        mechanism: of their attention, or its name.
        share: of the transformers in the prediction, where there are both.
        augmentation, smoothing: as in `PatternTask`.
        steps: of gradient descent at most.
        passes: times that each series is seen at most: small sets have fewer steps than `steps`.
        work: products at most, in billions, in the training of one member: large series have fewer steps.
        batch_size, learning_rate, weight_decay, warmup, clip: of every member; the rate goes down by half a cosine,
            after a warm-up of this share of the steps.

    >>> ModernRecipe.from_dict(ModernRecipe().to_dict()) == ModernRecipe()
    True
    """

    bank: BankSizes | None = BankSizes()
    banks: int = 1
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        object.__setattr__(self, "mechanism", as_primal(self.mechanism))
        if self.bank is None and not self.members:
            raise ValueError("ModernRecipe: give a bank, members, or both")
        if not 0 <= self.share <= 1:
            raise ValueError(f"ModernRecipe: share must be in [0, 1], got {self.share!r}")

    def training(self, data: Dataset, sizes: PatternSizes) -> Recipe:
        """How one member is trained on a set: as many steps as its size allows."""
        batch = min(self.batch_size, len(data.train))
        products = 3e-9 * batch * sizes.config(data).products
        steps = min(self.steps, self.passes * len(data.train) // batch, int(self.work / products))
        steps = max(20, steps)
        return Recipe(
            sizes, steps=steps, batch_size=batch, optimizer="adamw", learning_rate=self.learning_rate,
            schedule=Cosine(max(1, round(self.warmup * steps))), weight_decay=self.weight_decay, clip=self.clip,
            evaluate_every=steps,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ModernModel:
    """What `fit` found, and predicts with.

    Args:
        banks: prototypes, their solved values, and the temperature of their scores.
        members: transformers.
        recipe: that all of it was made with.
        classifies: whether there are classes.
    """

    banks: list[tuple[PrototypeBank, Ridge, float]]
    members: list[nn.Module]
    recipe: ModernRecipe
    classifies: bool

    @torch.no_grad()
    def parts(self, split: Split, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """What banks and members each predict in the mean: probabilities [cases, classes], or numbers [cases, 1]."""
        x, padding, _ = series_tensors(split, torch.float32, torch.device(device))
        assert x is not None
        size = max(1, PREDICTED // x.shape[1])
        pairs = list(zip(x.split(size), [None] * len(x) if padding is None else padding.split(size), strict=False))
        found = {}
        if self.banks:
            each = []
            for bank, values, temperature in self.banks:
                scores = values(_features(bank.to(device), x, padding))
                each.append((temperature * scores).softmax(1) if self.classifies else scores)
            found["bank"] = torch.stack(each).mean(0)
        if self.members:
            each = []
            for member in self.members:
                member = member.to(device).eval()
                scores = torch.cat([member(*pair) for pair in pairs]).double().cpu()
                each.append(scores.softmax(1) if self.classifies else scores.unsqueeze(1))
            found["members"] = torch.stack(each).mean(0)
        return found

    def predict(self, split: Split, device: torch.device | str = "cpu") -> Tensor:
        """Probabilities [cases, classes], or numbers [cases, 1]."""
        found = self.parts(split, device)
        if len(found) == 1:
            return next(iter(found.values()))
        return (1 - self.recipe.share) * found["bank"] + self.recipe.share * found["members"]


def fit(
    data: Dataset, recipe: ModernRecipe, seed: int, device: torch.device | str = "cpu", watch: tuple[Watch, ...] = ()
) -> ModernModel:
    """Train on the training series of a set; those of a regression have standardised targets."""
    device = torch.device(device)
    banks = []
    for i in range(recipe.banks if recipe.bank else 0):
        assert recipe.bank is not None
        banks.append(solved(data, recipe.bank, seed + i, device))
    members = []
    for i, sizes in enumerate(recipe.members):
        training = recipe.training(data, sizes)
        task = PatternTask(data, recipe.mechanism, sizes, recipe.augmentation, recipe.smoothing)
        task.parts = {"train": task.parts["train"]}
        run = Training(Ensemble(task, training, [seed + i], device))
        run.run(watch)
        if run.failures[0] is None:
            members.append(run.ensemble.model(0))
    if not banks and not members:
        raise RuntimeError(f"{data.name}: no member has a finite loss; lower the learning rate")
    return ModernModel(banks, members, recipe, bool(data.classes))


def solved(data: Dataset, sizes: BankSizes, seed: int, device: torch.device) -> tuple[PrototypeBank, Ridge, float]:
    """A bank, the values of its prototypes, and the temperature under which left-out cases are most likely."""
    x, padding, y = series_tensors(data.train, torch.float32, device)
    assert x is not None and y is not None
    fewer = max(LEAST, FEATURES // (len(x) * sizes.features))
    bank = PrototypeBank.drawn(replace(sizes, prototypes=min(sizes.prototypes, fewer)), x, padding, seed)
    features = _features(bank, x, padding)
    y = y.cpu()
    if not data.classes:
        values = ridge(features, y.unsqueeze(1))
        return bank, replace(values, held_out=values.held_out[:0]), 1.0
    # squared errors of ±1 would shrink scores of many classes too much, and of few series to the shares of the classes
    values = ridge(
        features, 2.0 * one_hot(y, data.outputs) - 1.0, [alpha for alpha in ALPHAS if alpha <= SHRUNK],
        lambda scores: min(_log_loss(t * scores, y) for t in TEMPERATURES),
    )  # fmt: skip
    temperature = min(TEMPERATURES, key=lambda t: _log_loss(t * values.held_out, y))
    return bank, replace(values, held_out=values.held_out[:0]), temperature


def _features(bank: PrototypeBank, x: Tensor, padding: Tensor | None) -> Tensor:
    """[cases, features], on the CPU; on one few series at a time, so that their scores stay in its cache."""
    size = max(1, (CACHED if x.device.type == "cpu" else PREDICTED) // x.shape[1])
    hidden = [None] * len(x) if padding is None else padding.split(size)
    return torch.cat([bank(*pair).cpu() for pair in zip(x.split(size), hidden, strict=False)])


def _log_loss(scores: Tensor, y: Tensor) -> float:
    return float(cross_entropy(scores, y))
