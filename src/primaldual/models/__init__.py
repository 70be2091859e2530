"""Models that the paper's experiments train."""

from torch import nn

from ..primal import Spec
from .config import SeriesConfig, SeriesSizes
from .sequences import SequenceClassifier, SequenceConfig, SequenceSizes
from .series import SeriesTransformer, build

MODELS: dict[type[Spec], type[nn.Module]] = {SeriesConfig: SeriesTransformer, SequenceConfig: SequenceClassifier}
"""The model of every kind of settings."""

__all__ = [
    "MODELS", "SequenceClassifier", "SequenceConfig", "SequenceSizes", "SeriesConfig", "SeriesSizes",
    "SeriesTransformer", "build",
]  # fmt: skip
