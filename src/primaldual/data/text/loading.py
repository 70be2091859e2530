"""A text by name or by path: from the cache, else read, made tokens of, and kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from ...base.cache import cache_directory
from ...base.suggestions import did_you_mean
from ..cache import CacheError
from ..errors import DataError, DataMismatchError, DataNotFoundError
from ..sequences.raw import RawFiles
from ..sequences.text import IMDB
from ..sources import DATA_VARIABLE, data_directory
from . import store
from .sources import Files, Imdb, TextSource
from .texts import TextSet
from .tokenizers import Bytes, Subwords, Tokenizer

logger = logging.getLogger(__name__)

KNOWN: Mapping[str, tuple[int, int, int]] = {"text-imdb": (23_750, 1_250, 25_000)}
"""Texts that have a name, with the documents of their parts."""


def load(
    what: str | Path,
    data_dir: str | Path | None = None,
    *,
    tokenizer: str | Path | None = None,
    cache_dir: str | Path | None = None,
    check: bool = True,
    rebuild: bool = False,
) -> TextSet:
    """A text as tokens, prepared.

    It comes from the cache. What is not there, was made from other files or is damaged, is read and kept in the cache;
    with the prepared text there, the raw files of a text that has a name are not needed.

    Args:
        what: a file of text; a folder, all of whose .txt, .text, .md and .rst files are read; the archive of IMDb; or
            "text-imdb", which finds that archive in the data directory.
        data_dir: holds the archive, itself or in a folder; else that of the environment variable `PRIMALDUAL_DATA`.
        tokenizer: a file of the `tokenizers` library; bytes unless given.
        cache_dir: else that of `PRIMALDUAL_CACHE`, else the user's cache directory.
        check: whether other numbers of documents than the published are an error.
        rebuild: read it whatever the cache holds.
    """
    made: Tokenizer = Bytes() if tokenizer is None else Subwords(tokenizer)
    directory, cache = data_directory(data_dir), cache_directory(cache_dir)
    base, source = _source(what, directory)
    name = base if made.name == "bytes" else f"{base}-{made.name}"
    folder = store.text_folder(name if base in KNOWN else f"{name}-{_short(Path(what).resolve())}", cache)
    reason = None
    if folder.exists() and not rebuild:
        try:
            data = store.read(folder)
            if source is None or not stale(data, folder, source):
                return _checked(base, data, str(folder), check)
            reason = f"{folder} was prepared from other text than {source.origin} now holds"
        except CacheError as error:
            reason = str(error)
    if source is None:
        raise DataNotFoundError(_not_found(base, directory, reason))
    if reason:
        logger.warning("%s; preparing it anew", reason)
    store.write(name, source, made, folder)
    return _checked(base, store.read(folder), source.origin, check)


def missing(name: str, data_dir: str | Path | None = None, *, cache_dir: str | Path | None = None) -> str | None:
    """Why `load` could not give a text by name here, in words; nothing is read to find out."""
    try:
        base, source = _source(name, directory := data_directory(data_dir))
    except DataError as error:
        return str(error)
    there = source is not None or store.text_folder(base, cache_directory(cache_dir)).exists()
    return None if there else _not_found(base, directory, None)


def problems(name: str, data_dir: Path | None, cache_dir: Path) -> tuple[TextSet | None, list[str]]:
    """What is wrong with a prepared text, to the last byte, in words; and the text where it can be read.

    Args:
        name: one of `store.stored_names`.
    """
    folder = store.text_folder(name, cache_dir)
    if not folder.exists():
        return None, [f"it is not prepared: there is no {folder}"]
    try:
        data = store.read(folder, hashes=True)
        source = _source(name, data_dir)[1] if name in KNOWN else None
        changed = source is not None and stale(data, folder, source)
    except DataError as error:
        return None, [str(error)]
    found = [f"it was prepared from other text than {source.origin} now holds"] if changed and source else []
    return data, found + _differences(name, data)


def stale(data: TextSet, folder: Path, source: TextSource) -> bool:
    """Whether a prepared text is made from something else."""
    return source.stamp() != store.source_stamp(folder) and source.digest() != data.source_hash


def names_in(directory: Path) -> list[str]:
    """The texts with a name whose raw files are in a data directory."""
    return [name for name in KNOWN if IMDB.find(directory)]


def _source(what: str | Path, directory: Path | None) -> tuple[str, TextSource | None]:
    """The name of a text, and what it is read from, if it is here."""
    if str(what) in KNOWN:
        raw = None if directory is None else IMDB.find(directory)
        return str(what), None if raw is None else Imdb(raw)
    path = Path(what).expanduser()
    if not path.exists():
        raise DataNotFoundError(
            f"there is no text {what}: neither a file nor a folder of this name is here, nor is it a name"
            f"{did_you_mean(what, KNOWN)} Names are: {', '.join(KNOWN)}"
        )
    if path.name in IMDB.any_of:
        return "text-imdb", Imdb(RawFiles((path,), IMDB))
    if path.suffix in (".gz", ".xz", ".bz2", ".zip", ".tar", ".tgz"):
        raise DataNotFoundError(f"{path} is an archive: unpack it, and give the folder")
    return (path.resolve().stem if path.is_file() else path.resolve().name) or "text", Files(path)


def _checked(name: str, data: TextSet, where: str, check: bool) -> TextSet:
    if check and (found := _differences(name, data)):
        raise DataMismatchError(
            f"{where}: not {name} as it is published: {'; '.join(found)}. The files are truncated or of another "
            f"edition; check=False (--no-check) takes them as they are; {IMDB.get}"
        )
    return data


def _differences(name: str, data: TextSet) -> list[str]:
    found = tuple(one.documents for one in data.parts.values())
    if name not in KNOWN or found == KNOWN[name]:
        return []
    mine, published = (" + ".join(map(str, counts)) for counts in (found, KNOWN[name]))
    return [f"it has {mine} documents, published are {published}"]


def _not_found(name: str, directory: Path | None, reason: str | None) -> str:
    get = f"{IMDB.get}; name the folder by --data-dir or {DATA_VARIABLE}"
    if reason:
        return f"{reason}, and its raw files are not to be had to make it anew; {get}"
    where = f"neither {directory} nor a folder of it holds" if directory else "no data directory is given that holds"
    return f"{name} is not prepared, and {where} {IMDB.names}; {get}"


def _short(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:8]
