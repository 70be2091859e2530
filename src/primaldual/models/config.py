"""What a time-series transformer is, stated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..primal import Primal, Spec, as_primal
from ..primal._spec import check_choice, check_count, is_number

ENCODERS = ("mvts", "flowformer")
TASKS = ("classification", "regression")


@dataclass(frozen=True)
class SeriesConfig(Spec):
    """The settings of a `SeriesTransformer`; frozen, comparable, JSON both ways.

    Args:
        channels, length: of the series, after padding.
        outputs: one score per class; 1 for regression.
        encoder: "mvts" (BatchNorm, padding hidden from attention, all blocks start alike) or "flowformer" (LayerNorm,
            one more after the last block, no mask in attention, blocks start apart).
        mechanism: a `Primal`, or the name of one.
        task: "classification" or "regression".
        d_model, heads, layers, feedforward: sizes; those of mvts_transformer unless given.
        dropout: everywhere, on the attention weights too unless `attention_dropout` says otherwise.
        impl: the executor of the attention, as in `primaldual.attention`.

    >>> config = SeriesConfig(channels=12, length=26, outputs=9, mechanism="bn")
    >>> SeriesConfig.from_dict(config.to_dict()) == config
    True
    """

    channels: int
    length: int
    outputs: int
    encoder: str = "mvts"
    mechanism: str | Primal = field(default_factory=Primal)
    task: str = "classification"
    d_model: int = 64
    heads: int = 8
    layers: int = 3
    feedforward: int = 256
    dropout: float = 0.1
    attention_dropout: float | None = None
    impl: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mechanism", as_primal(self.mechanism))
        for name in ("channels", "length", "outputs", "d_model", "heads", "layers", "feedforward"):
            check_count("SeriesConfig", name, getattr(self, name))
        check_choice("SeriesConfig", "encoder", self.encoder, ENCODERS)
        check_choice("SeriesConfig", "task", self.task, TASKS)
        if self.task == "regression" and self.outputs != 1:
            raise ValueError(f"SeriesConfig: regression has 1 output, got outputs={self.outputs}")
        if self.d_model % self.heads:
            raise ValueError(
                f"SeriesConfig: d_model must be a multiple of heads, got d_model={self.d_model}, heads={self.heads}"
            )
        for name in ("dropout", "attention_dropout"):
            value: Any = getattr(self, name)
            if value is not None and not (is_number(value) and 0.0 <= value < 1.0):
                raise ValueError(f"SeriesConfig: {name} must be in [0, 1), got {value!r}")
