"""Where the raw files of a set come from: a data directory, the aeon package, or a download."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import shutil
import struct
import tempfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ..base.files import sweep_folders
from .errors import DataError, DataFormatError, DataNotFoundError
from .ts import TsFile, read_ts

PARSER_VERSION = 1
"""To be raised when the same raw files give other tensors; what was prepared before is then stale."""

DATA_VARIABLE = "PRIMALDUAL_DATA"


@dataclass(frozen=True)
class Source:
    """The raw files of a set.

    Args:
        files: the zip, or the training and the test file.
        origin: where from, in words.
    """

    name: str
    files: tuple[Path, ...]
    origin: str

    def digest(self) -> str:
        """SHA-256 of the files and the version of what reads them."""
        digest = hashlib.sha256(f"primaldual .ts {PARSER_VERSION}\n".encode())
        for path in self.files:
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def read(self, part: str) -> TsFile:
        """The series of `part`, "TRAIN" or "TEST"."""
        if self.files[0].suffix == ".zip":
            return _read_zip(self.files[0], f"{self.name}_{part}.ts")
        return read_file(self.files[0 if part == "TRAIN" else 1])


def read_file(path: Path) -> TsFile:
    """The series of a `.ts` file."""
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return read_ts(lines, str(path))


def _read_zip(path: Path, member: str) -> TsFile:
    """A member, in whatever folder of the zip it lies."""
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            found = [one for one in archive.infolist() if one.filename.rpartition("/")[2].lower() == member.lower()]
            if not found:
                raise DataFormatError(str(path), None, f"there is no {member} inside")
            _check_member(path, found[0])
            with (
                archive.open(found[0]) as stream,
                io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace") as lines,
            ):
                return read_ts(lines, f"{path}:{found[0].filename}")
    except (PermissionError, FileNotFoundError, IsADirectoryError, DataFormatError):
        raise
    except _ZIP_ERRORS as error:
        said = str(error) or type(error).__name__
        raise DataFormatError(str(path), None, f"not a whole zip file ({said}); download it again") from None


_ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, NotImplementedError, RuntimeError, ValueError,
    LookupError, OverflowError, struct.error,
)  # fmt: skip
"""What Python raises about a file that is no zip, or not whole: it depends on the compression, and on the place."""

PLAUSIBLE = 1 << 24, 250
"""Bytes that any member of a zip may have when it is unpacked; a larger one so many times its packed size."""


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    """Before anything of it is unpacked."""
    if member.flag_bits & 1:
        raise DataFormatError(str(path), None, f"{member.filename} is encrypted; pack it without a password")
    always, ratio = PLAUSIBLE
    if member.file_size > max(always, ratio * member.compress_size):
        raise DataFormatError(
            str(path), None,
            f"{member.filename} says that its {member.compress_size:,} bytes unpack to {member.file_size:,}, which no "
            f"series do; unpack it by hand if they are",
        )  # fmt: skip


def check_name(name: str) -> None:
    """Raise unless `name` can be the name of a set, and so of a file."""
    if not re.fullmatch(r"[A-Za-z0-9][\w\-]*", name):
        path = Path(name)
        hint = f"; give {path.stem} and the data directory {path.parent}" if path.suffix == ".zip" else ""
        raise DataError(
            f"a data set is named by letters, digits, '-' and '_', such as JapaneseVowels; got {name!r}{hint}"
        )


def data_directory(directory: str | Path | None) -> Path | None:
    """The directory given, else that of `PRIMALDUAL_DATA`; it must exist."""
    chosen = directory or os.environ.get(DATA_VARIABLE)
    if not chosen:
        return None
    path = Path(chosen).expanduser()
    if not path.is_dir():
        by = "" if directory else f" (from {DATA_VARIABLE})"
        raise DataNotFoundError(f"the data directory {path}{by} does not exist")
    return path


def folders(directory: Path) -> list[Path]:
    """A directory and what is in it; none where it does not exist."""
    return [directory, *sorted(p for p in directory.iterdir() if p.is_dir())] if directory.is_dir() else []


def in_directory(name: str, directory: Path) -> Source | None:
    """`<Name>/<Name>_TRAIN.ts` or `<Name>.zip`, in the directory or in a folder of it."""
    for folder in folders(directory):
        pair = tuple(folder / name / f"{name}_{part}.ts" for part in ("TRAIN", "TEST"))
        if any(path.is_file() for path in pair):
            for path in pair:
                if not path.is_file():
                    raise DataNotFoundError(f"{name}: {path} is missing; both _TRAIN.ts and _TEST.ts are needed")
            return Source(name, pair, str(folder / name))
        if (archive := folder / f"{name}.zip").is_file():
            return Source(name, (archive,), str(archive))
    return None


def names_in(directory: Path) -> list[str]:
    """The sets that `in_directory` finds."""
    found = set()
    for folder in folders(directory):
        found |= {path.stem for path in folder.glob("*.zip")}
        found |= {p.parent.name for p in folder.glob("*/*_TRAIN.ts") if p.name == f"{p.parent.name}_TRAIN.ts"}
    return sorted(found)


def aeon_directory() -> Path | None:
    """The sets inside the aeon package, which need not be imported for it."""
    spec = find_spec("aeon")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "datasets" / "data"
    return folder if folder.is_dir() else None


def in_aeon(name: str) -> Source | None:
    """A set inside the aeon package."""
    folder = aeon_directory()
    found = None if folder is None or not (folder / name).is_dir() else in_directory(name, folder)
    return None if found is None else Source(name, found.files, "the aeon package")


def download(name: str, directory: Path) -> Source | None:
    """Fetch a set of the archives into `directory` through aeon; None when the archives have none of that name."""
    if find_spec("aeon") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own imports, nothing that a reader could act on
        aeon = import_module("aeon.datasets")
        if name in import_module("aeon.datasets.tsc_datasets").tsc_zenodo:
            fetch = aeon.load_classification
        elif name in import_module("aeon.datasets.tser_datasets").tsr_zenodo:
            fetch = aeon.load_regression
        else:
            return None
    directory.mkdir(parents=True, exist_ok=True)
    sweep_folders(directory, ".download-")
    scratch = Path(tempfile.mkdtemp(dir=directory, prefix=".download-"))  # a broken download leaves nothing behind
    try:
        fetch(name, split="train", extract_path=str(scratch))
        shutil.rmtree(directory / name, ignore_errors=True)
        (scratch / name).replace(directory / name)
    except (OSError, ValueError) as error:
        raise DataNotFoundError(
            f"{name} could not be downloaded: {error}. Get {name}.zip from timeseriesclassification.com (regression: "
            f"Zenodo's TSER archive) and name its folder by --data-dir or {DATA_VARIABLE}"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return in_directory(name, directory)
