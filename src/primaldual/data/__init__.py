"""Time series of the UEA and TSER archives: found, checked, prepared, kept."""

from .archive import Entry, manifest
from .cache import CacheError
from .dataset import Dataset, Split
from .errors import DataError, DataFormatError, DataMismatchError, DataNotFoundError
from .loading import load, load_files
from .prepare import Preparation, fill_gaps

__all__ = [
    "CacheError", "DataError", "DataFormatError", "DataMismatchError", "DataNotFoundError", "Dataset", "Entry",
    "Preparation", "Split", "fill_gaps", "load", "load_files", "manifest",
]  # fmt: skip
