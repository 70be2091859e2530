"""Long sequences of tokens to classify: the tasks of the Long Range Arena, generated or prepared once, kept compact."""

from .documents import Cases, Documents, SequenceSet, content_hash, side_by_side

__all__ = ["Cases", "Documents", "SequenceSet", "content_hash", "side_by_side"]
