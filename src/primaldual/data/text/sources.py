"""Where text comes from: a file, a folder of files, or the archive of IMDb; and which of it is held out.

Held out are a twentieth of the documents for validation, and another for the test where the text has no test part of
its own. They are drawn from a seed; the rest is in the order of that draw, so that neighbours have nothing in common.
Of a text with few documents each is cut instead: its last tenth is held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import DataNotFoundError
from ..sequences.raw import RawFiles

VERSION = 1
"""To be raised when the same files give other parts; what was prepared before is then stale."""

SHARE = 0.05
"""Of the documents that is held out, for validation and for the test each."""
FEW = 40
"""Fewer documents than this are cut, each of them."""
SUFFIXES = (".txt", ".text", ".md", ".rst")
"""Of the files of a folder that are read."""
PARTS = ("train", "validation", "test")


class Document(NamedTuple):
    """Some text, and what to call it in an error."""

    where: str
    read: Callable[[], bytes]


Parts = dict[str, list[Document]]


class TextSource(Protocol):
    """What a text is read from."""

    @property
    def origin(self) -> str:
        """In words."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how it is read."""

    def stamp(self) -> str:
        """As long as it is the same, so is the text."""

    def digest(self) -> str:
        """SHA-256 of the files, and of how they are read."""

    def parts(self) -> Parts:
        """The documents of every part."""


@dataclass(frozen=True)
class Files:
    """A file, or a folder of files; in a folder, text in `train/` and `test/` is divided so already."""

    path: Path

    @property
    def origin(self) -> str:
        return str(self.path)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def stamp(self) -> str:
        return self._hashed(lambda path: f"{path.stat().st_size} {path.stat().st_mtime_ns}")

    def digest(self) -> str:
        return self._hashed(_sha256)

    def parts(self) -> Parts:
        if self.path.is_file():
            return divided([self._document(self.path)])
        own: Parts = {part: [] for part in PARTS}
        for path in self._found:
            if (part := path.relative_to(self.path).parts[0]) in own:
                own[part].append(self._document(path))
        if not (own["train"] and own["test"]):
            return divided([self._document(path) for path in self._found])
        if own["validation"]:
            return {part: shuffled(documents) for part, documents in own.items()}
        return held_out(own["train"], ("validation",)) | {"test": shuffled(own["test"])}

    @property
    def _found(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        inside = (path for path in self.path.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        visible = sorted(p for p in inside if not any(x.startswith(".") for x in p.relative_to(self.path).parts))
        if not visible:
            raise DataNotFoundError(f"{self.path} has no text in it: no file with a name in {', '.join(SUFFIXES)}")
        return visible

    def _document(self, path: Path) -> Document:
        return Document(str(path), path.read_bytes)

    def _hashed(self, about: Callable[[Path], str]) -> str:
        digest = hashlib.sha256(f"primaldual text {VERSION}\n".encode())
        for path in self._found:
            digest.update(f"{path.relative_to(self.path.parent).as_posix()} {about(path)}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Imdb:
    """The reviews of IMDb with a label, whole: the train folder but for what is held out, and the test folder."""

    raw: RawFiles

    @property
    def origin(self) -> str:
        return self.raw.origin

    @property
    def notes(self) -> tuple[str, ...]:
        return ("reviews as they stand, <br /> among them; those without a label, train/unsup, are not read",)

    def stamp(self) -> str:
        return f"{VERSION} {self.raw.stamp()}"

    def digest(self) -> str:
        return hashlib.sha256(f"primaldual text {VERSION} {self.raw.digest()}".encode()).hexdigest()

    def parts(self) -> Parts:
        found: dict[str, list[tuple[str, bytes]]] = {"train": [], "test": []}
        for name, content in self.raw.members():
            match = self.raw.format.wanted.search(name)
            assert match is not None  # only such are members
            found[match[1]].append((name, content))
        for part, reviews in found.items():
            if not reviews:
                raise self.raw.broken(self.raw.origin, f"there are no reviews such as {part}/pos/0_9.txt inside")
        train, test = ([self._document(*one) for one in sorted(found[part])] for part in ("train", "test"))
        return held_out(train, ("validation",)) | {"test": shuffled(test)}

    def _document(self, name: str, content: bytes) -> Document:
        return Document(f"{self.raw.origin}: {name}", lambda: content)


def divided(documents: list[Document]) -> Parts:
    """Documents without a division of their own."""
    if len(documents) >= FEW:
        return held_out(documents, ("validation", "test"))
    return {part: [_piece(one, *ends) for one in documents] for part, ends in _ENDS.items()}


_ENDS = {"train": (0.0, 1 - 2 * SHARE), "validation": (1 - 2 * SHARE, 1 - SHARE), "test": (1 - SHARE, 1.0)}


def held_out(documents: list[Document], parts: Iterable[str]) -> Parts:
    """A share of the documents for each of the parts, and the rest for training."""
    rest = shuffled(documents)
    if len(rest) < 2:
        raise DataNotFoundError(f"{rest[0].where} is the only document for training, of which none can be held out")
    many = max(1, round(SHARE * len(rest)))
    found: Parts = {}
    for part in parts:
        found[part], rest = rest[:many], rest[many:]
    return {"train": rest} | found


def shuffled(documents: list[Document]) -> list[Document]:
    """In the order of a draw that is always the same."""
    return [documents[i] for i in np.random.default_rng(0).permutation(len(documents))]


def _piece(document: Document, start: float, end: float) -> Document:
    """A share of a document, cut between characters of UTF-8."""

    def read() -> bytes:
        content = document.read()
        return content[_boundary(content, start) : _boundary(content, end)]

    return Document(document.where, read)


def _boundary(content: bytes, share: float) -> int:
    place = round(share * len(content))
    while place < len(content) and content[place] & 0xC0 == 0x80:  # inside a character
        place += 1
    return place


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def contents(documents: Iterable[Document]) -> Iterator[tuple[str, bytes]]:
    """Of documents that are not empty, in their order."""
    for one in documents:
        if content := one.read():
            yield one.where, content
