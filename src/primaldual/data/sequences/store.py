"""Prepared sets on disk: a folder each, of arrays to be mapped into memory, and a manifest that says what they are.

The tokens are as in memory; offsets, indices of documents and labels are of the smallest type that holds them. A part
that is the same cases as another is not written twice.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from ...base.files import replacing_folder, write_json
from ..cache import CacheError
from ..manifests import MANIFEST, read_manifest
from .documents import Cases, Documents, SequenceSet, content_hash

VERSION = 1
"""Of what is written; what was prepared by another version is stale."""


def set_folder(name: str, directory: Path) -> Path:
    """Where a set is kept."""
    return directory / "sequences" / name


def stored_names(directory: Path) -> list[str]:
    """The sets that are there, damaged or not."""
    return sorted(path.name for path in (directory / "sequences").glob("[!.]*") if path.is_dir())


def write(data: SequenceSet, folder: Path, stamp: str) -> None:
    """All or nothing: a reader sees the old folder or the new one, whole.

    Args:
        stamp: of the source, by which it is known again without a look at its contents.
    """
    arrays = {"tokens": data.documents.raw, "offsets": _compact(data.documents.offsets)}
    parts: dict[str, dict[str, Any]] = {}
    for part, cases in data.parts.items():
        same = next((other for other in parts if data.parts[other] is cases), part)
        parts[part] = {"cases": len(cases), "arrays": same}
        if same == part:
            arrays |= {f"{part}.documents": _compact(cases.documents), f"{part}.labels": _compact(cases.labels)}
    about = {
        "version": VERSION, "name": data.name, "title": data.title, "classes": data.classes, "length": data.length,
        "vocabulary": data.vocabulary, "shift": data.documents.shift, "bits": data.documents.bits,
        "documents": len(data.documents), "parts": parts, "notes": data.notes, "origin": data.origin,
        "hash": data.hash, "source_hash": data.source_hash, "source_stamp": stamp,
    }  # fmt: skip
    try:
        with replacing_folder(folder) as scratch:
            for name, array in arrays.items():
                np.save(scratch / f"{name}.npy", array)
            files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in scratch.iterdir()}
            write_json(scratch / MANIFEST, about | {"files": dict(sorted(files.items()))})
    except OSError as error:
        raise CacheError(
            f"{folder} cannot be written ({error}); choose another cache directory by PRIMALDUAL_CACHE"
        ) from None


def read(folder: Path, *, hashes: bool = False) -> SequenceSet:
    """A prepared set; its files are of the lengths that were written, and what they hold fits together.

    Args:
        hashes: whether to look at every byte, too: are the files those that were written?
    """
    about = read_manifest(folder, VERSION)
    try:
        for name, file in about["files"].items():
            _check_file(folder / name, file, hashes)
        data = _assemble(folder, about)
        counts = {name: part["cases"] for name, part in about["parts"].items()} | {"documents": about["documents"]}
    except CacheError:
        raise
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise CacheError(f"{folder} is damaged ({type(error).__name__}: {error})") from None
    if wrong := _misfit(data, counts):
        raise CacheError(f"{folder} is damaged: {wrong}")
    if hashes and content_hash(data.documents, data.parts) != data.hash:
        raise CacheError(f"{folder} is damaged: its contents do not have the hash that was written with them")
    return data


def source_stamp(folder: Path) -> str:
    """Of the source, as it was when the set was prepared."""
    return str(read_manifest(folder, VERSION).get("source_stamp"))


def size(folder: Path) -> int:
    """Bytes on disk."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _check_file(path: Path, file: dict[str, Any], hashes: bool) -> None:
    if (found := path.stat().st_size) != file["bytes"]:
        raise CacheError(f"{path} is damaged: it has {found} bytes, not {file['bytes']}")
    if hashes and _sha256(path) != file["sha256"]:
        raise CacheError(f"{path} is damaged: it does not have the hash that was written with it")


def _assemble(folder: Path, about: dict[str, Any]) -> SequenceSet:
    tokens = np.load(folder / "tokens.npy", mmap_mode="c")  # who writes into them writes into a copy, never the file
    documents = Documents(tokens.view(np.ndarray), _whole(folder / "offsets.npy"), about["shift"], about["bits"])
    arrays = {
        name: Cases(_whole(folder / f"{name}.documents.npy"), _whole(folder / f"{name}.labels.npy"))
        for name in {part["arrays"] for part in about["parts"].values()}
    }
    return SequenceSet(
        about["name"], about["title"], documents,
        {name: arrays[part["arrays"]] for name, part in about["parts"].items()},
        tuple(about["classes"]), about["length"], about["vocabulary"], tuple(about["notes"]), about["origin"],
        about["hash"], about["source_hash"],
    )  # fmt: skip


def _misfit(data: SequenceSet, counts: dict[str, int]) -> str | None:
    """What of a set does not fit together."""
    offsets, raw = data.documents.offsets, data.documents.raw
    tokens = int(offsets[-1]) if offsets.ndim == 1 and len(offsets) else -1
    if len(data.documents) != counts["documents"] or tokens < 0 or (np.diff(offsets) < 0).any() or offsets[0]:
        return "the offsets are not those of its documents"
    if raw.dtype != np.uint8 or raw.shape != (-(-tokens * data.documents.bits // 8),):
        return f"its {tokens} tokens of {data.documents.bits} bits are not {raw.shape} of {raw.dtype}"
    if data.documents.lengths.max(initial=0) > data.length:
        return f"a document is longer than {data.length}"
    for part, cases in data.parts.items():
        if len(cases) != counts[part] or len(cases.documents) != counts[part]:
            return f"the {part} part does not have {counts[part]} cases"
        if cases.documents.max(initial=0) >= len(data.documents) or cases.labels.max(initial=0) >= len(data.classes):
            return f"the {part} part is of documents or classes that are not there"
    return None


def _whole(path: Path) -> np.ndarray:
    return np.load(path).astype(np.int64)


def _compact(array: np.ndarray) -> np.ndarray:
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
