"""What the demo runs: the mechanisms, and the model and training that all of them share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..primal import Primal, mechanism

BETA = 0.1
"""β of BN and of BN+SH: the paper's value for BasicMotions."""

SCALES = (1, 1, 2, 2, 4, 4, 8, 8)
"""Keys and values are halved after every two successive heads."""

PAPER = {"softmax": (98.75, 1.25), "bn": (99.38, 1.08), "sh": (99.37, 1.06), "bn+sh": (99.78, 0.51)}
"""Accuracy on BasicMotions, mean and std in percent, as the paper reports it (Table more-uea-classification)."""


SHOWN = "walking"
"""The class whose first test series is shown in the attention maps."""


class DemoError(RuntimeError):
    """The demo cannot run or must not go on; `status` is the exit status of the command."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Recipe:
    """One demo. The model and the optimiser follow mvts_transformer in a smaller size.

    It differs in two ways: LayerNorm, and no dropout on the attention weights.

    Args:
        seeds: training runs per mechanism, with seeds 0, 1, …
        epochs: length of each run; the accuracy reported is that of the last one.
        sweep: the β of the sweep beside 0 (softmax) and the β of `bn`; each is run with `sweep_seeds` seeds.
        budget: seconds after which no further round of runs is started.
        workers: processes, of one thread each; None for as many as there are cores, at most 4.
    """

    seeds: int = 5
    epochs: int = 20
    sweep: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    sweep_seeds: int = 3
    budget: float = 150.0
    workers: int | None = None
    d_model: int = 64
    heads: int = 8
    layers: int = 2
    feedforward: int = 128
    dropout: float = 0.1
    batch: int = 10
    learning_rate: float = 1e-3
    clip: float = 4.0

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; no limit on time is None."""
        return asdict(self) | {
            "sweep": list(self.sweep),
            "budget": None if self.budget == float("inf") else self.budget,
        }


def family() -> dict[str, Primal]:
    """The four softmax-family mechanisms as the demo runs them."""
    return {
        "softmax": mechanism("softmax"),
        "bn": mechanism("bn", beta=BETA),
        "sh": mechanism("sh", scales=SCALES),
        "bn+sh": mechanism("bn+sh", beta=BETA, scales=SCALES),
    }
