"""Text: reviews of IMDb, byte by byte; is the reviewer content?

A case is the UTF-8 file of a review as it stands, cut after 4,000 bytes. The benchmark selects models on the test part:
its validation part is the same 25,000 reviews, and so it is here.
"""

from __future__ import annotations

import re

import numpy as np

from .documents import Cases, SequenceSet, side_by_side
from .raw import Format, RawFiles

LENGTH = 4000
"""Bytes of a review that are kept."""

_REVIEW = re.compile(r"(?:^|/)(train|test)/(neg|pos)/(\d+)_\d+\.txt$")


def read(raw: RawFiles) -> SequenceSet:
    """The reviews in the order of part, label and number, whatever that of the archive."""
    found: dict[str, list[tuple[bool, int, str, bytes]]] = {"train": [], "test": []}
    for path, content in raw.members():
        match = _REVIEW.search(path)
        assert match is not None  # only such are members
        part, label, number = match.groups()
        if not content:
            raise raw.broken(f"{raw.origin}: {path}", "the review is empty")
        found[part].append((label == "pos", int(number), path, content[:LENGTH]))
    parts: dict[str, Cases] = {}
    reviews: list[bytes] = []
    for part, cases in found.items():
        if not cases:
            raise raw.broken(raw.origin, f"there are no reviews such as {part}/pos/0_9.txt inside")
        cases.sort()
        labels = np.array([positive for positive, *_ in cases], dtype=np.int64)
        parts[part] = Cases(len(reviews) + np.arange(len(cases)), labels)
        reviews += [review for *_, review in cases]
    tokens = np.frombuffer(bytearray().join(reviews), np.uint8)
    documents = side_by_side(tokens, np.array([len(review) for review in reviews]))
    parts = {"train": parts["train"], "validation": parts["test"], "test": parts["test"]}
    notes = ("validation and test are the same reviews, as in the benchmark",)
    return SequenceSet("lra-text", "Text", documents, parts, ("negative", "positive"), 4096, 257, notes)


IMDB = Format(
    read=read,
    get="get aclImdb_v1.tar.gz from https://ai.stanford.edu/~amaas/data/sentiment",
    any_of=("aclImdb", "aclImdb_v1.tar.gz", "aclImdb_v1.tar.xz", "aclImdb_v1.tar"),
    wanted=_REVIEW,
)
