"""Models: the encoders that the paper's experiments train, and a language model."""

from torch import nn

from ..primal import Spec
from .bank import BankSizes, PrototypeBank
from .config import SeriesConfig, SeriesSizes
from .language import LANGUAGE_SIZES, LanguageConfig, LanguageModel, LanguageSizes
from .patterns import PatternConfig, PatternSizes, PatternTransformer
from .sequences import SequenceClassifier, SequenceConfig, SequenceSizes
from .series import SeriesTransformer, build
from .solved_bank import BankConfig, SolvedBank

MODELS: dict[type[Spec], type[nn.Module]] = {
    SeriesConfig: SeriesTransformer, SequenceConfig: SequenceClassifier, PatternConfig: PatternTransformer,
    LanguageConfig: LanguageModel, BankConfig: SolvedBank,
}  # fmt: skip
"""The model of every kind of settings."""

__all__ = [
    "LANGUAGE_SIZES", "MODELS", "BankConfig", "BankSizes", "LanguageConfig", "LanguageModel", "LanguageSizes",
    "PatternConfig", "PatternSizes", "PatternTransformer", "PrototypeBank", "SequenceClassifier", "SequenceConfig",
    "SequenceSizes", "SeriesConfig", "SeriesSizes", "SeriesTransformer", "SolvedBank", "build",
]  # fmt: skip
