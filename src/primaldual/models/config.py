"""What a time-series transformer is, stated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ..primal import Primal, Spec, as_primal
from ..primal._spec import check_choice, check_count
from .sizes import check_sizes

if TYPE_CHECKING:
    from ..data import Dataset

ENCODERS = ("mvts", "flowformer")
TASKS = ("classification", "regression")


@dataclass(frozen=True)
class SeriesSizes(Spec):
    """A `SeriesTransformer` but for what its data and its mechanism say.

    Args:
        encoder: "mvts" (BatchNorm, padding hidden from attention, all blocks start alike) or "flowformer" (LayerNorm,
            one more after the last block, no mask in attention, blocks start apart).
        d_model, heads, layers, feedforward: sizes; those of mvts_transformer unless given.
        dropout: everywhere, on the attention weights too unless `attention_dropout` says otherwise.
    """

    encoder: str = "mvts"
    d_model: int = 64
    heads: int = 8
    layers: int = 3
    feedforward: int = 256
    dropout: float = 0.1
    attention_dropout: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "d_model", "heads", "layers", "feedforward")
        check_choice(type(self).__name__, "encoder", self.encoder, ENCODERS)

    def config(self, data: Dataset, mechanism: str | Primal = "softmax", impl: str = "auto") -> SeriesConfig:
        """The model for a data set."""
        return SeriesConfig(
            **asdict(self), channels=data.channels, length=data.length, outputs=data.outputs, mechanism=mechanism,
            task=data.kind, impl=impl,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SeriesConfig(SeriesSizes):
    """The settings of a `SeriesTransformer`; frozen, comparable, JSON both ways.

    Args:
        channels, length: of the series, after padding.
        outputs: one score per class; 1 for regression.
        mechanism: a `Primal`, or the name of one.
        task: "classification" or "regression".
        impl: the executor of the attention, as in `primaldual.attention`.

    >>> config = SeriesConfig(channels=12, length=26, outputs=9, mechanism="bn")
    >>> SeriesConfig.from_dict(config.to_dict()) == config
    True
    """

    channels: int
    length: int
    outputs: int
    mechanism: str | Primal = field(default_factory=Primal)
    task: str = "classification"
    impl: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mechanism", as_primal(self.mechanism))
        for name in ("channels", "length", "outputs"):
            check_count("SeriesConfig", name, getattr(self, name))
        check_choice("SeriesConfig", "task", self.task, TASKS)
        if self.task == "regression" and self.outputs != 1:
            raise ValueError(f"SeriesConfig: regression has 1 output, got outputs={self.outputs}")
