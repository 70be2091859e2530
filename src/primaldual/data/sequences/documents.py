"""Sequences of tokens, each document once and side by side, and the cases that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of tokens, one after the other in a flat array, which may be a memory-mapped file.

    A token is a number of `bits` bits. What a model sees is the token plus `shift`: where documents end before a batch
    does it sees 0, which a shift of 1 keeps apart from every token.

    Args:
        raw: [bytes], uint8: a token each, or two with 4 bits, of which the lower four bits come first.
        offsets: [documents + 1], int64: document i is made of tokens offsets[i] to offsets[i + 1].
        shift: 0 or 1.
        bits: of a token: 8 or 4.
    """

    raw: np.ndarray
    offsets: np.ndarray
    shift: int = 1
    bits: int = 8

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[documents], int64: how many tokens each has."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of a document as a model sees them, int64."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        if self.bits == 8:
            return self.raw[start:end].astype(np.int64) + self.shift
        places = np.arange(start, end)
        return ((self.raw[places >> 1] >> (4 * (places & 1)).astype(np.uint8)) & 15).astype(np.int64) + self.shift


@dataclass(frozen=True, eq=False)
class Cases:
    """What is classified: documents, or pairs of them.

    Args:
        documents: [cases], or [cases, 2] for pairs, int64: which of the documents.
        labels: [cases], int64.
    """

    documents: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class SequenceSet:
    """A set of sequences to classify, as a task of the Long Range Arena is.

    Args:
        name: as `primaldual.data.sequences.load` takes it, such as "lra-listops".
        title: as tables show it, such as "ListOps".
        documents: every document once.
        parts: "train", "validation" and "test".
        classes: names of the labels 0, 1, …
        length: tokens of a padded sequence, which the model has positions for; no document is longer.
        vocabulary: ids that a model may see, 0 among them.
        notes: what a user of the set should know.
        origin: where the raw files were, or how it was generated.
        hash: SHA-256 of all that a model sees.
        source_hash: of the raw files and of what read them, or of the generator and its settings.
    """

    name: str
    title: str
    documents: Documents
    parts: Mapping[str, Cases]
    classes: tuple[str, ...]
    length: int
    vocabulary: int
    notes: tuple[str, ...] = ()
    origin: str = ""
    hash: str = ""
    source_hash: str = ""

    @property
    def pairs(self) -> bool:
        """Whether a case is a pair of documents."""
        return self.parts["train"].documents.ndim == 2
