"""Text as tokens, one document after the other, and which of it is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class TextPart(NamedTuple):
    """A run of tokens, which begins with a separator and has one after each document.

    Args:
        start, end: its tokens are start … end − 1 of the set's.
        documents: how many.
        bytes: of the documents' files, and one for the separator after each of them.
    """

    start: int
    end: int
    documents: int
    bytes: int

    @property
    def predicted(self) -> int:
        """Tokens that a model is to predict: all but the first, which is a separator."""
        return self.end - self.start - 1


@dataclass(frozen=True, eq=False)
class TextSet:
    """Documents as tokens, and what of them is for training, for validation and for the test.

    Args:
        name: as `primaldual.data.text.load` takes it, or that of the file or folder.
        tokens: [tokens], uint8 or int32, which may be mapped from a file: part after part.
        parts: "train", "validation" and "test".
        vocabulary: how many different tokens there can be, the separator among them.
        separator: the token that stands between documents.
        tokenizer: "bytes", or the name of another.
        notes: what a user of the set should know.
        origin: where the text was.
        hash: SHA-256 of the tokens and of where the parts end.
        source_hash: of the files, and of what read them.
    """

    name: str
    tokens: np.ndarray
    parts: Mapping[str, TextPart]
    vocabulary: int
    separator: int
    tokenizer: str = "bytes"
    notes: tuple[str, ...] = ()
    origin: str = ""
    hash: str = ""
    source_hash: str = ""

    def of(self, part: str) -> np.ndarray:
        """The tokens of a part."""
        start, end, *_ = self.parts[part]
        return self.tokens[start:end]
