"""What can be wrong with data."""

from __future__ import annotations


class DataError(ValueError):
    """A data set cannot be had, or is not what it should be."""


class DataNotFoundError(DataError):
    """No such set in any of the places that were searched."""


class DataFormatError(DataError):
    """A file is truncated, malformed or not of the format that its name says."""

    def __init__(self, file: str, line: int | None, message: str) -> None:
        super().__init__(f"{file}{'' if line is None else f', line {line}'}: {message}")
        self.file, self.line = file, line


class DataMismatchError(DataError):
    """A set is not of the size that is published."""
