"""Models: the encoders that the paper's experiments train, and a language model."""

from torch import nn

from ..primal import Spec
from .config import SeriesConfig, SeriesSizes
from .language import LANGUAGE_SIZES, LanguageConfig, LanguageModel, LanguageSizes
from .sequences import SequenceClassifier, SequenceConfig, SequenceSizes
from .series import SeriesTransformer, build

MODELS: dict[type[Spec], type[nn.Module]] = {
    SeriesConfig: SeriesTransformer, SequenceConfig: SequenceClassifier, LanguageConfig: LanguageModel,
}  # fmt: skip
"""The model of every kind of settings."""

__all__ = [
    "LANGUAGE_SIZES", "MODELS", "LanguageConfig", "LanguageModel", "LanguageSizes", "SequenceClassifier",
    "SequenceConfig", "SequenceSizes", "SeriesConfig", "SeriesSizes", "SeriesTransformer", "build",
]  # fmt: skip
