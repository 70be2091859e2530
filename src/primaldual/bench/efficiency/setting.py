"""What is counted and measured: one size of the Retrieval model, and how a step of it runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import torch

from ...models import SequenceConfig, SequenceSizes
from ...primal import mechanism

Step = Literal["training", "inference"]
Attention = Literal["materialised", "fused"]
DeviceKind = Literal["cuda", "cpu"]

STEPS: tuple[Step, ...] = ("training", "inference")
ATTENTIONS: tuple[Attention, ...] = ("materialised", "fused")
BASELINES = {"sh": "softmax", "bn+sh": "softmax", "sparse-sh": "sparse", "sparse-bn+sh": "sparse"}
"""The mechanisms of the paper's figures, and what each is divided by."""

MECHANISMS = ("softmax", "sh", "bn+sh", "sparse", "sparse-sh", "sparse-bn+sh")
CLASSES = 2


@dataclass(frozen=True)
class Setting:
    """A step of the Retrieval model on pairs of documents without padding.

    There are two layers and two heads, of scales 1 and 2 where they are pooled; feed-forward parts are twice as wide as
    the model.

    Args:
        dimension: of the model.
        length: tokens of a document.
        pairs: of a step.
        step: "training" is forward, loss and backward; "inference" is forward without gradients.
        attention: "materialised": every score is written out, in float32, one document of a pair after the other, as
            the code did that the paper's is made of. "fused": no score is, in 16 bits on a GPU, both documents at once.
        device: the kind of device: numbers are as wide there and dropout keeps what it does there.
        dropout: everywhere, on the attention weights too.
        in_turn: whether documents run one after the other, where that is to be other than the attention says.
        optimizer: also count what AdamW keeps: two moments of every weight, and in inference gradients, too.

    >>> Setting(64, 4096).sequences
    1
    """

    dimension: int
    length: int
    pairs: int = 1
    step: Step = "training"
    attention: Attention = "materialised"
    device: DeviceKind = "cuda"
    dropout: float = 0.1
    in_turn: bool | None = None
    optimizer: bool = False

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.step == "training"

    @property
    def fused(self) -> bool:
        """Whether scores never reach memory."""
        return self.attention == "fused"

    @property
    def dtype(self) -> torch.dtype:
        """Of all tensors but a norm's statistics."""
        return torch.bfloat16 if self.fused and self.device == "cuda" else torch.float32

    @property
    def passes(self) -> int:
        """How often the encoder runs in a step."""
        return 2 if (not self.fused if self.in_turn is None else self.in_turn) else 1

    @property
    def sequences(self) -> int:
        """Documents of a pass."""
        return 2 * self.pairs // self.passes

    @property
    def dropped(self) -> float:
        """The dropout of this step."""
        return self.dropout if self.trains else 0.0

    @property
    def weights_dropped(self) -> float:
        """That of the attention weights; torch's fused attention has none on a CPU."""
        return 0.0 if self.fused and self.device == "cpu" else self.dropped

    @property
    def sizes(self) -> SequenceSizes:
        """Of the model."""
        return SequenceSizes(
            d_model=self.dimension, feedforward=2 * self.dimension, dropout=self.dropout,
            attention_dropout=0.0 if self.fused and self.device == "cpu" else None,
        )  # fmt: skip

    def config(self, name: str) -> SequenceConfig:
        """The model with a mechanism; scores are written out by the executor "dense"."""
        return SequenceConfig(
            **asdict(self.sizes), length=self.length, outputs=CLASSES, pairs=True, mechanism=mechanism(name),
            impl="auto" if self.fused else "dense",
        )  # fmt: skip
