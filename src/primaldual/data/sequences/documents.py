"""Sequences of tokens, each document once and side by side, and the cases that are made of them."""

from __future__ import annotations

import hashlib
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


def side_by_side(tokens: np.ndarray, lengths: np.ndarray, *, shift: int = 1, bits: int = 8) -> Documents:
    """Documents of `tokens`, uint8 and one after the other, of which each has so many of `lengths`.

    >>> [document.tolist() for document in side_by_side(np.array([7, 8, 9], np.uint8), np.array([1, 2]), bits=4)]
    [[8], [9, 10]]
    """
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if offsets[-1] != len(tokens):
        raise ValueError(f"documents of {offsets[-1]} tokens together are made of {len(tokens)}: give each its length")
    if bits == 8:
        return Documents(np.ascontiguousarray(tokens, dtype=np.uint8), offsets, shift)
    if len(tokens) and int(tokens.max()) > 15:
        raise ValueError(f"a token of 4 bits is at most 15, not {tokens.max()}: take bits=8")
    raw = np.zeros((len(tokens) + 1) // 2, dtype=np.uint8)
    raw[: len(tokens) // 2] = tokens[1::2] << 4
    raw |= tokens[::2]
    return Documents(raw, offsets, shift, bits)


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


def content_hash(documents: Documents, parts: Mapping[str, Cases]) -> str:
    """SHA-256 of all that a model sees: the same for equal tokens and cases, wherever they come from."""
    digest = hashlib.sha256(f"{documents.bits} {documents.shift}\n".encode())
    arrays = [("raw", documents.raw, "u1"), ("offsets", documents.offsets, "<i8")]
    for part in sorted(parts):
        arrays += [(f"{part}.documents", parts[part].documents, "<i8"), (f"{part}.labels", parts[part].labels, "<i8")]
    for name, array, dtype in arrays:
        digest.update(f"{name} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


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
        hash: SHA-256 of all that a model sees, as `content_hash` takes it.
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
