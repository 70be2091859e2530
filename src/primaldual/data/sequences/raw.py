"""Raw files as they are downloaded: an archive, the folder that it unpacks to, or files side by side."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from ..errors import DataFormatError, DataNotFoundError
from ..sources import folders
from .chunks import Progress
from .documents import SequenceSet, content_hash

READER_VERSION = 1
"""To be raised when the same raw files give other sequences; what was prepared before is then stale."""

_NOTHING = re.compile("$^")


@dataclass(frozen=True)
class Format:
    """The raw files that a set is read from.

    Args:
        read: makes the set of them.
        get: what to do who does not have them, in words.
        any_of: names of one archive and of the folder that it unpacks to; the first that is there is read.
        all_of: or names of files side by side, all of which are needed.
        wanted: what is read of an archive or a folder; found in names such as "aclImdb/train/pos/0_9.txt".
        are_these: whether files are those of the set, where the files of another have the same names.
    """

    read: Callable[[RawFiles], SequenceSet]
    get: str
    any_of: tuple[str, ...] = ()
    all_of: tuple[str, ...] = ()
    wanted: re.Pattern[str] = _NOTHING
    are_these: Callable[[RawFiles], bool] = lambda raw: True

    @property
    def names(self) -> str:
        """What is looked for, in words."""
        return " or ".join(self.any_of) or f"{', '.join(self.all_of[:-1])} and {self.all_of[-1]}"

    def find(self, directory: Path) -> RawFiles | None:
        """In the directory or in a folder of it."""
        for folder in folders(directory):
            for name in self.any_of:
                if (path := folder / name).exists():
                    return RawFiles((path,), self)
            paths = tuple(folder / name for name in self.all_of)
            if any(path.is_file() for path in paths):
                for path in paths:
                    if not path.is_file():
                        raise DataNotFoundError(f"{path} is missing, {self.names} are needed; {self.get}")
                return RawFiles(paths, self)
        return None

    def is_in(self, directory: Path) -> bool:
        """Whether these files are there, or some of them."""
        try:
            raw = self.find(directory)
        except DataNotFoundError:  # what is missing is told to who wants the set
            return True
        return raw is not None and self.are_these(raw)


@dataclass(frozen=True)
class RawFiles:
    """The raw files of a set.

    Args:
        paths: one archive, one folder, or files side by side.
    """

    paths: tuple[Path, ...]
    format: Format

    def prepare(self, processes: int | None = None, progress: Progress | None = None) -> SequenceSet:
        """The set of them; it takes seconds in one process, with nothing to report."""
        data = self.format.read(self)
        content = content_hash(data.documents, data.parts)
        return replace(data, origin=self.origin, hash=content, source_hash=self.digest())

    @property
    def others(self) -> str:
        """How a set came about that was not read from them."""
        return f"from other files than {self.origin}"

    @property
    def origin(self) -> str:
        """Where they lie."""
        return str(self.paths[0] if len(self.paths) == 1 else self.paths[0].parent)

    def members(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of what is wanted inside an archive, in one pass, or in a folder."""
        (path,) = self.paths
        if path.is_dir():
            yield from ((file.relative_to(path.parent).as_posix(), file.read_bytes()) for file in self._files())
        else:
            yield from self._inside(path)

    def broken(self, what: str, message: str, line: int | None = None) -> DataFormatError:
        """The error to raise about a file, or about a member of the archive or the folder."""
        return DataFormatError(what, line, f"{message}; {self.format.get}")

    def stamp(self) -> str:
        """Of names, sizes and times of the files: as long as it is the same, so are they."""
        digest = hashlib.sha256(f"primaldual sequences {READER_VERSION}\n".encode())
        for path in self._files():
            about = path.stat()
            digest.update(f"{path} {about.st_size} {about.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def digest(self) -> str:
        """SHA-256 of the files and the version of what reads them."""
        digest = hashlib.sha256(f"primaldual sequences {READER_VERSION}\n".encode())
        for path in self._files():
            with path.open("rb") as stream:
                name = path.relative_to(self.paths[0].parent).as_posix()
                digest.update(f"{name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        """The files themselves, of a folder those that are wanted, in the order of their names."""
        if not self.paths[0].is_dir():
            return list(self.paths)
        found = (Path(folder) / name for folder, _, names in os.walk(self.paths[0]) for name in names)
        return sorted(path for path in found if self.format.wanted.search(path.as_posix()))

    def _inside(self, path: Path) -> Iterator[tuple[str, bytes]]:
        try:
            with _unpacked(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    if member.isfile() and self.format.wanted.search(member.name):
                        content = archive.extractfile(member)
                        assert content is not None  # it is a file
                        yield member.name, content.read()
                while stream.read(1 << 20):  # to the end, where the sum of a compressed file is checked
                    pass
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise self.broken(str(path), f"not a whole archive ({error})") from None


def _unpacked(path: Path) -> IO[bytes]:
    """The bytes of a tar file, whichever way it is compressed."""
    if path.suffix == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")
