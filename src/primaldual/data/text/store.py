"""Prepared text on disk: a folder with a file of tokens, to be mapped into memory, and a manifest of what it is.

Documents are written as they are read, so that a text may be larger than the memory.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ...base.files import replacing_folder, write_json
from ..cache import CacheError
from ..errors import DataFormatError
from ..manifests import MANIFEST, read_manifest
from .sources import PARTS, TextSource, contents
from .texts import TextPart, TextSet
from .tokenizers import Tokenizer

VERSION = 1
"""Of what is written; what was prepared by another version is stale."""
TOKENS = "tokens.bin"


def text_folder(name: str, directory: Path) -> Path:
    """Where a text is kept."""
    return directory / "text" / name


def stored_names(directory: Path) -> list[str]:
    """The texts that are there, damaged or not."""
    return sorted(path.name for path in (directory / "text").glob("[!.]*") if path.is_dir())


def write(name: str, source: TextSource, tokenizer: Tokenizer, folder: Path) -> None:
    """Read, make tokens of and keep a text. All or nothing: a reader sees the old folder or the new one, whole."""
    stamp = source.stamp()  # before it is read: who changes it meanwhile changes the stamp
    documents = source.parts()
    try:
        with replacing_folder(folder) as scratch:
            parts: dict[str, TextPart] = {}
            digest = hashlib.sha256()
            with (scratch / TOKENS).open("wb") as stream:
                start = 0

                def keep(tokens: np.ndarray) -> int:
                    written = np.ascontiguousarray(tokens, dtype=tokenizer.dtype).tobytes()
                    stream.write(written)
                    digest.update(written)
                    return len(tokens)

                between = np.array([tokenizer.separator], dtype=tokenizer.dtype)
                for part in PARTS:
                    end, many, size = start + keep(between), 0, 0
                    for where, content in contents(documents[part]):
                        end += keep(tokenizer.encode(content, where)) + keep(between)
                        many, size = many + 1, size + len(content) + 1
                    if not many:
                        raise DataFormatError(source.origin, None, f"there is no text for the {part} part in it")
                    parts[part] = TextPart(start, end, many, size)
                    start = end
            found = digest.hexdigest()
            about = {
                "version": VERSION, "name": name, "tokenizer": tokenizer.name, "vocabulary": tokenizer.vocabulary,
                "separator": tokenizer.separator, "dtype": np.dtype(tokenizer.dtype).str,
                "parts": {part: one._asdict() for part, one in parts.items()}, "notes": source.notes,
                "origin": source.origin, "hash": content_hash(found, tokenizer, parts),
                "source_hash": source.digest(), "source_stamp": stamp, "sha256": found,
            }  # fmt: skip
            write_json(scratch / MANIFEST, about)
    except OSError as error:
        raise CacheError(
            f"{error.filename or folder} cannot be read or written ({error}); the cache directory is that of "
            f"PRIMALDUAL_CACHE"
        ) from None


def content_hash(tokens: str, tokenizer: Any, parts: dict[str, TextPart]) -> str:
    """SHA-256 of all that a model sees, from that of the tokens."""
    sizes = {part: list(one) for part, one in parts.items()}
    what = [tokens, tokenizer.name, tokenizer.vocabulary, tokenizer.separator, sizes]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def read(folder: Path, *, hashes: bool = False) -> TextSet:
    """A prepared text; its file is of the length that was written.

    Args:
        hashes: whether to look at every byte, too: is the file the one that was written?
    """
    about = read_manifest(folder, VERSION)
    path = folder / TOKENS
    try:
        parts = {part: TextPart(**one) for part, one in about["parts"].items()}
        dtype, size = np.dtype(about["dtype"]), path.stat().st_size
        wanted = max(one.end for one in parts.values()) * dtype.itemsize
        if size != wanted:
            raise CacheError(f"{path} is damaged: it has {size} bytes, not {wanted}")
        if hashes:
            with path.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != about["sha256"]:
                    raise CacheError(f"{path} is damaged: it does not have the hash that was written with it")
        if wrong := _misfit(parts):
            raise CacheError(f"{folder} is damaged: {wrong}")
        tokens = np.memmap(path, dtype, "c")  # who writes into them writes into a copy, never the file
        return TextSet(
            about["name"], tokens.view(np.ndarray), parts, about["vocabulary"], about["separator"],
            about["tokenizer"], tuple(about["notes"]), about["origin"], about["hash"], about["source_hash"],
        )  # fmt: skip
    except CacheError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CacheError(f"{folder} is damaged ({type(error).__name__}: {error})") from None


def _misfit(parts: dict[str, TextPart]) -> str | None:
    """What of the parts does not fit together."""
    start = 0
    for part in PARTS:
        if part not in parts:
            return f"there is no {part} part in it"
        one = parts[part]
        if one.start != start or one.predicted < one.documents or one.documents < 1 or one.bytes < 1:
            return f"its {part} part cannot be {one}"
        start = one.end
    return None


def source_stamp(folder: Path) -> str:
    """Of the source, as it was when the text was prepared."""
    return str(read_manifest(folder, VERSION).get("source_stamp"))
