"""Models that the paper's experiments train."""

from .config import SeriesConfig
from .series import SeriesTransformer, build

__all__ = ["SeriesConfig", "SeriesTransformer", "build"]
