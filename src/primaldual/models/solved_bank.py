"""A bank of prototypes with the values that a regression solved for: a model like the others, but for gradients."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..primal._spec import check_choice, check_count
from .bank import BankSizes, PrototypeBank, places
from .config import TASKS

if TYPE_CHECKING:
    from ..svr.ridge import Ridge

AT_ONCE, CACHED = 1 << 15, 1 << 10
"""Steps that are looked at together; and on a CPU, so that the scores of few series stay in its cache."""
MOST_PLACES = 1 << 10
"""Widths times dilations."""


@dataclass(frozen=True, kw_only=True)
class BankConfig(BankSizes):
    """The settings of a `SolvedBank`; frozen, comparable, JSON both ways.

    Args:
        channels, length: of the series, after padding.
        steps: of a training series in the mean, which dilations follow from.
        outputs: one score per class; 1 for regression.
        task: "classification" or "regression".

    >>> config = BankConfig(channels=12, length=26, steps=20, outputs=9)
    >>> BankConfig.from_dict(config.to_dict()) == config
    True
    """

    channels: int
    length: int
    steps: int
    outputs: int
    task: str = "classification"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("channels", "length", "steps", "outputs"):
            check_count("BankConfig", name, getattr(self, name))
        check_choice("BankConfig", "task", self.task, TASKS)
        if len(self.widths) > MOST_PLACES or len(places(self, self.steps)) > MOST_PLACES:
            raise ValueError(f"BankConfig: more than {MOST_PLACES} widths and dilations, got {len(self.widths)} widths")

    @classmethod
    def of(cls, bank: PrototypeBank, channels: int, length: int, steps: int, outputs: int, task: str) -> BankConfig:
        """Of a bank that was drawn."""
        return cls(
            **asdict(bank.sizes), channels=channels, length=length, steps=steps, outputs=outputs, task=task
        )  # fmt: skip


class SolvedBank(nn.Module):
    """y = t (V (φ(x) − m) / s + b),  with the mean attention weights φ of a `PrototypeBank` and solved values V.

    m and s standardise the weights; t is the temperature under which scores of cases that were left out are most
    likely as logits, and 1 for a regression.

    >>> model = SolvedBank(BankConfig(channels=3, length=40, steps=40, outputs=4, prototypes=32))
    >>> model(torch.randn(2, 40, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(self, config: BankConfig) -> None:
        super().__init__()
        self.config = config
        found = places(config, config.steps)
        each = -(-config.prototypes // len(found))
        self.bank = PrototypeBank(
            [torch.zeros(each, config.channels, width) for width, _ in found],
            [torch.zeros(each, config.biases) for _ in found], tuple(d for _, d in found), config,
        )  # fmt: skip
        features = each * config.features * len(found)
        for name, start in (("mean", torch.zeros), ("std", torch.ones)):
            self.register_buffer(name, start(features))
        self.register_buffer("values", torch.zeros(features, config.outputs))
        self.register_buffer("intercept", torch.zeros(config.outputs))
        self.register_buffer("temperature", torch.ones(()))

    @classmethod
    def of(cls, config: BankConfig, bank: PrototypeBank, solved: Ridge, temperature: float = 1.0) -> SolvedBank:
        """A bank and the regression on its features, on the CPU."""
        model = cls(config)
        state: dict[str, Any] = {f"bank.{name}": x for name, x in bank.state_dict().items()}
        state |= {"mean": solved.mean, "std": solved.std, "values": solved.coefficients, "intercept": solved.intercept}
        model.load_state_dict(state | {"temperature": torch.tensor(temperature)})
        return model.eval()

    @torch.no_grad()
    def forward(self, series: Tensor, padding: Tensor | None = None) -> Tensor:
        """Scores [batch, classes], or predictions [batch] for regression.

        Args:
            series: [batch, length, channels], 0 at padded steps.
            padding: [batch, length], True after the end of a series.
        """
        features = (bank_features(self.bank, series, padding) - self.get_buffer("mean")) / self.get_buffer("std")
        found = features @ self.get_buffer("values") + self.get_buffer("intercept")
        found = self.get_buffer("temperature") * found
        return found.squeeze(-1) if self.config.task == "regression" else found


def bank_features(bank: PrototypeBank, series: Tensor, padding: Tensor | None) -> Tensor:
    """The features of a bank, of a few series at a time."""
    size = max(1, (CACHED if series.device.type == "cpu" else AT_ONCE) // series.shape[1])
    hidden = [None] * len(series) if padding is None else padding.split(size)
    return torch.cat([bank(*pair) for pair in zip(series.split(size), hidden, strict=False)])
