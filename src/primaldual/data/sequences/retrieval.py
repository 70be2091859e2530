"""Retrieval: pairs of documents, byte by byte; does one cite the other?

A line of `new_aan_pairs.{train,eval,test}.tsv` is a pair: label, id 1, id 2, text 1, text 2, with tabs between. Texts
are taken as they stand, cut after 4,000 bytes. In the benchmark's own files a text is a literal of Python, b'…' with
backslashes for what is not ASCII; the benchmark's loader takes it so, and so it was in the published numbers.

The benchmark's pairs are papers of the ACL Anthology Network (AAN). Files of the same format with pairs of manual pages
make a set of another name and title, so that its results are not taken for those on AAN.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import DataMismatchError
from .documents import Cases, SequenceSet, side_by_side
from .raw import Format, RawFiles

LENGTH = 4000
"""Bytes of a document that are kept."""
AAN_CASES = (147_086, 18_090, 17_437)
"""Pairs of AAN in the training, validation and test parts."""

_FILES = {
    part: f"new_aan_pairs.{name}.tsv" for part, name in (("train", "train"), ("validation", "eval"), ("test", "test"))
}


def read_aan(raw: RawFiles) -> SequenceSet:
    """AAN's pairs, and no others."""
    data = _read(raw, "lra-retrieval", "Retrieval")
    cases = tuple(len(part) for part in data.parts.values())
    if cases != AAN_CASES:
        numbers, published = (" + ".join(map(str, three)) for three in (cases, AAN_CASES))
        raise DataMismatchError(
            f"{raw.origin}: these are not AAN's pairs, or not all of them: they are {numbers}, AAN's {published}; "
            f"lra-retrieval-manpages takes such files of other documents"
        )
    return data


def read_manual_pages(raw: RawFiles) -> SequenceSet:
    """Pairs of other documents, however many."""
    data = _read(raw, "lra-retrieval-manpages", "Retrieval (manual pages)")
    if tuple(len(part) for part in data.parts.values()) == AAN_CASES:
        raise DataMismatchError(f"{raw.origin}: these are AAN's pairs; lra-retrieval is their name")
    return data


def are_aan(raw: RawFiles) -> bool:
    """Whether the files are AAN's, as far as the number of validation pairs tells."""
    with raw.paths[1].open("rb") as stream:
        return sum(1 for _ in stream) == AAN_CASES[1]


def _read(raw: RawFiles, name: str, title: str) -> SequenceSet:
    """Each text once, in the order in which they first come, and the pairs of them."""
    index: dict[bytes, int] = {}
    parts = {}
    for part, path in zip(_FILES, raw.paths, strict=True):
        pairs, labels = [], []
        for label, *texts in _lines(raw, path):
            pairs.append([index.setdefault(text, len(index)) for text in texts])
            labels.append(label)
        if not labels:
            raise raw.broken(str(path), "there are no pairs inside")
        parts[part] = Cases(np.array(pairs, dtype=np.int64), np.array(labels, dtype=np.int64))
    notes = [
        f"{n} of {len(parts[part])} {part} pairs are training pairs, too, in this order or the other"
        for part in ("validation", "test")
        if (n := _shared(parts[part], parts["train"]))
    ]
    if literals := sum(text.startswith((b"b'", b'b"')) for text in index):
        notes.append(f"{literals} of {len(index)} texts are literals of Python, b'…', taken as they stand")
    tokens = np.frombuffer(bytearray().join(index), np.uint8)
    documents = side_by_side(tokens, np.array([len(text) for text in index]))
    return SequenceSet(name, title, documents, parts, ("unrelated", "citing"), 4096, 257, tuple(notes))


def _shared(pairs: Cases, others: Cases) -> int:
    """How many of the pairs are of the same two documents as one of the others."""
    known = {tuple(sorted(pair)) for pair in others.documents.tolist()}
    return sum(tuple(sorted(pair)) in known for pair in pairs.documents.tolist())


def _lines(raw: RawFiles, path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Label and texts of each pair."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            label, *columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 4:
                message = "expected 5 columns with tabs between: label, id 1, id 2, text 1, text 2; got"
                raise raw.broken(str(path), f"{message} {1 + len(columns)}", number)
            if label not in (b"0", b"1", b"0.0", b"1.0"):
                raise raw.broken(
                    str(path), f"the label must be 0.0 or 1.0, got {label[:20].decode(errors='replace')!r}", number
                )
            one, two = (text[:LENGTH] for text in columns[2:])
            if not one or not two:
                raise raw.broken(str(path), "a text is empty", number)
            yield int(label[:1]), one, two


AAN = Format(
    read=read_aan,
    get="get lra_release.gz from https://github.com/google-research/long-range-arena: they are in its folder tsv_data",
    all_of=tuple(_FILES.values()),
    are_these=are_aan,
)
MANUAL_PAGES = Format(
    read=read_manual_pages,
    get="write them of your documents, a pair a line: label, id 1, id 2, text 1, text 2, with tabs between",
    all_of=tuple(_FILES.values()),
    are_these=lambda raw: not are_aan(raw),
)
