"""Long sequences of tokens to classify: the tasks of the Long Range Arena, generated or prepared once, kept compact."""

from .documents import Cases, Documents, SequenceSet

__all__ = ["Cases", "Documents", "SequenceSet"]
