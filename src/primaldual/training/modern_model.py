"""What the recipe for people comes to: banks and members, and how they predict together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Split
from ..models import BankSizes, PatternSizes
from .calibration import Calibration, calibrated
from .modern import ModernRecipe
from .progress import History
from .series import series_tensors

PREDICTED = 1 << 15
"""Steps that are predicted from at once."""


@dataclass(frozen=True)
class Part:
    """What is fitted on its own: a bank, a member, or the member that calibrates.

    Args:
        number: among those of its kind.
        sizes: of the bank or the member.
        seed: that it is drawn by.
        calibrates: whether it leaves out cases, and does not predict.
    """

    number: int
    sizes: BankSizes | PatternSizes
    seed: int
    calibrates: bool = False


@dataclass(frozen=True, eq=False)
class FittedPart:
    """A part with its model.

    Args:
        part: what it is.
        model: on the CPU.
        steps: that it was trained for; 0 of a bank.
        history: of the training.
        held_out: what it says of cases that it did not see: a bank of every training case, one that calibrates of
            those that it left out.
    """

    part: Part
    model: Any
    steps: int = 0
    history: History = field(default_factory=dict)
    held_out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ModernModel:
    """What `fit` found, and predicts with.

    Args:
        fitted: banks, members, and what calibrates them.
        recipe: that all of it was made with.
        classifies: whether there are classes.
        calibration: of the probabilities; None for a regression, and where nothing was held out.
        failures: members that are left out, as their loss was not finite.
    """

    fitted: list[FittedPart]
    recipe: ModernRecipe
    classifies: bool
    calibration: Calibration | None = None
    failures: tuple[str, ...] = ()

    @property
    def banks(self) -> list[FittedPart]:
        """In their order."""
        return [one for one in self.fitted if isinstance(one.part.sizes, BankSizes)]

    @property
    def members(self) -> list[FittedPart]:
        """Those that predict, in their order."""
        return [
            one for one in self.fitted if isinstance(one.part.sizes, PatternSizes) and not one.part.calibrates
        ]  # fmt: skip

    @property
    def shares(self) -> list[float]:
        """Of every bank and then every member in what is predicted."""
        banks, members = len(self.banks), len(self.members)
        share = self.recipe.share if banks and members else float(members > 0)
        return [(1 - share) / max(1, banks)] * banks + [share / max(1, members)] * members

    @property
    def temperature(self) -> float:
        """Of the probabilities."""
        return self.calibration.temperature if self.calibration else 1.0

    def parts(self, split: Split, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """What banks and members each predict in the mean: probabilities [cases, classes], or numbers [cases, 1]."""
        found = {"bank": self.banks, "members": self.members}
        return {
            name: torch.stack([said(one.model, split, device, self.classifies) for one in of]).mean(0)
            for name, of in found.items()
            if of
        }

    def predict(self, split: Split, device: torch.device | str = "cpu") -> Tensor:
        """Calibrated probabilities [cases, classes], or numbers [cases, 1]."""
        found = together(self.parts(split, device), self.recipe.share)
        return calibrated(found, self.temperature)


@torch.no_grad()
def said(model: nn.Module, split: Split, device: torch.device | str, classifies: bool) -> Tensor:
    """Probabilities [cases, classes], or numbers [cases, 1], of one model, on the CPU in float64."""
    x, padding, _ = series_tensors(split, torch.float32, torch.device(device))
    assert x is not None
    size = max(1, PREDICTED // x.shape[1])
    hidden = [None] * len(x) if padding is None else padding.split(size)
    model = model.to(device).eval()
    scores = torch.cat([model(*pair) for pair in zip(x.split(size), hidden, strict=False)]).double().cpu()
    model.cpu()
    return scores.softmax(1) if classifies else scores.unsqueeze(1)


def together(parts: dict[str, Tensor], share: float) -> Tensor:
    """What banks and members predict, where there are both with this share of the members."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return (1 - share) * parts["bank"] + share * parts["members"]
