"""A set by name: from the cache, else generated or read from raw files, and kept."""

from __future__ import annotations

import logging
from pathlib import Path

from ...base.cache import cache_directory
from ..cache import CacheError
from ..errors import DataError, DataMismatchError, DataNotFoundError
from ..sources import DATA_VARIABLE, data_directory
from . import store
from .catalogue import Entry, Source, entry
from .chunks import Progress
from .documents import SequenceSet
from .raw import Format

logger = logging.getLogger(__name__)


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    check: bool = True,
    rebuild: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
) -> SequenceSet:
    """A task of the Long Range Arena, prepared.

    It comes from the cache. What is not there, was made from other files or is damaged, is generated, or read from the
    raw files in the data directory, and kept in the cache; with the prepared set there, raw files are not needed. Its
    tokens are mapped into memory from there.

    Args:
        name: one of `known()`, such as "lra-text".
        data_dir: holds the raw files, itself or in a folder; else that of the environment variable `PRIMALDUAL_DATA`.
        cache_dir: else that of `PRIMALDUAL_CACHE`, else the user's cache directory.
        check: whether sizes other than the published are an error.
        rebuild: generate or read it whatever the cache holds.
        processes: that generate; all cores' worth unless given.
        progress: called by a generator with how many cases are done, and how many there will be.
    """
    known = entry(name)
    directory, cache = data_directory(data_dir), cache_directory(cache_dir)
    folder = store.set_folder(name, cache)
    source = known.source(directory)
    reason = None
    if folder.exists() and not rebuild:
        try:
            data = store.read(folder)
            if source is None or not _stale(data, folder, source):
                _check(known, data, str(folder), check)
                return data
            reason = f"{folder} was prepared {source.others}"
        except CacheError as error:
            reason = str(error)
    if source is None:
        raise DataNotFoundError(_not_found(known, directory, reason))
    if reason:
        logger.warning("%s; preparing it anew", reason)
    stamp = source.stamp()  # before it is read: who changes it meanwhile changes the stamp
    data = source.prepare(processes, progress)
    _check(known, data, source.origin, check)
    store.write(data, folder, stamp)
    return store.read(folder)


def missing(name: str, data_dir: str | Path | None = None, *, cache_dir: str | Path | None = None) -> str | None:
    """Why `load` could not give a set here, in words; nothing is generated or read to find out."""
    try:
        known, directory = entry(name), data_directory(data_dir)
    except DataError as error:
        return str(error)
    there = store.set_folder(name, cache_directory(cache_dir)).exists() or known.source(directory) is not None
    return None if there else _not_found(known, directory, None)


def problems(name: str, data_dir: Path | None, cache_dir: Path) -> tuple[SequenceSet | None, list[str]]:
    """What is wrong with a prepared set, to the last byte, in words; and the set where it can be read."""
    try:
        known = entry(name)
        folder = store.set_folder(name, cache_dir)
        if not folder.exists():
            return None, [f"it is not prepared: there is no {folder}"]
        data = store.read(folder, hashes=True)
        source = known.source(data_dir)
        stale = source is not None and _stale(data, folder, source)
    except DataError as error:
        return None, [str(error)]
    return data, ([f"it was prepared {source.others}"] if stale and source else []) + known.differences(data)


def _stale(data: SequenceSet, folder: Path, source: Source) -> bool:
    """Whether a prepared set is made from something else."""
    return source.stamp() != store.source_stamp(folder) and source.digest() != data.source_hash


def _check(known: Entry, data: SequenceSet, where: str, check: bool) -> None:
    if check and (found := known.differences(data)):
        raise DataMismatchError(
            f"{where}: not {known.name} as it is published: {'; '.join(found)}. The files are truncated or of another "
            f"edition; check=False (--no-check) takes them as they are"
        )


def _not_found(known: Entry, directory: Path | None, reason: str | None) -> str:
    assert isinstance(known.made, Format)  # a generator is always there
    get = f"{known.made.get}; name the folder by --data-dir or {DATA_VARIABLE}"
    if reason:
        return f"{reason}, and its raw files are not to be had to make it anew; {get}"
    where = f"neither {directory} nor a folder of it holds" if directory else "no data directory is given that holds"
    return f"{known.name} is not prepared, and {where} {known.made.names}; {get}"
