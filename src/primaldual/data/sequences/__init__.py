"""Long sequences of tokens to classify: the tasks of the Long Range Arena, generated or prepared once, kept compact."""

from .catalogue import Entry, known
from .documents import Cases, Documents, SequenceSet, content_hash, side_by_side
from .loading import load, missing

__all__ = ["Cases", "Documents", "Entry", "SequenceSet", "content_hash", "known", "load", "missing", "side_by_side"]
