"""Models that the paper's experiments train."""

from .config import SeriesConfig, SeriesSizes
from .series import SeriesTransformer, build

__all__ = ["SeriesConfig", "SeriesSizes", "SeriesTransformer", "build"]
