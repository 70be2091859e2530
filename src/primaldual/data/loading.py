"""A data set by name: from the cache, else prepared from raw files and kept."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ..base.cache import cache_directory
from ..base.suggestions import did_you_mean
from . import cache
from .archive import manifest
from .dataset import Dataset
from .errors import DataError, DataMismatchError, DataNotFoundError
from .prepare import assemble
from .sources import (
    DATA_VARIABLE,
    Source,
    check_name,
    data_directory,
    download,
    in_aeon,
    in_directory,
    read_file,
)

logger = logging.getLogger(__name__)


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    check: bool = True,
    offline: bool = False,
    rebuild: bool = False,
    must_keep: bool = False,
) -> Dataset:
    """A set of the UEA or TSER archive, prepared.

    The raw files are taken from the data directory. A set that is not there comes from the cache, from inside the
    aeon package, or by download, in this order. With the prepared file in the cache neither raw files nor aeon are
    needed. What is prepared is kept in the cache; a stale or damaged file there is made anew.

    Args:
        name: such as "JapaneseVowels".
        data_dir: holds `<Name>/<Name>_TRAIN.ts` and `_TEST.ts`, or `<Name>.zip`, itself or in a folder; else that of
            the environment variable `PRIMALDUAL_DATA`.
        cache_dir: else that of `PRIMALDUAL_CACHE`, else the user's cache directory.
        check: whether sizes other than the archive's are an error.
        offline: never download.
        rebuild: parse the raw files whatever the cache holds.
        must_keep: whether a cache that cannot be written to is an error, and not a warning.
    """
    check_name(name)
    directory, store = data_directory(data_dir), cache_directory(cache_dir)
    path = cache.cache_file(name, store)
    raw = None if directory is None else in_directory(name, directory)
    reason = None
    if path.is_file() and not rebuild:
        try:
            data = cache.read(path)
            if raw is None or raw.digest() == data.source_hash:
                _check(data, path, check)
                return data
            reason = f"{path} was prepared from other files than {raw.origin}"
        except cache.CacheError as error:
            reason = str(error)
    source = raw or in_directory(name, store / "downloads") or in_aeon(name)
    if source is None and not offline:
        source = download(name, store / "downloads")
    if source is None:
        raise DataNotFoundError(_not_found(name, directory, reason, offline))
    if reason:
        logger.warning("%s; preparing it anew", reason)
    data = prepare(source, check=check)
    try:
        cache.write(data, path)
    except cache.CacheError as error:  # the data are here all the same
        if must_keep:
            raise
        logger.warning("%s; %s is not kept", error, name)
    return data


def load_files(train: str | Path, test: str | Path | None = None) -> Dataset:
    """The set of your own `.ts` files, prepared; nothing is cached.

    Without `test` the file beside `…_TRAIN.ts` called `…_TEST.ts` is taken; where there is none the test split is
    empty.
    """
    train = Path(train)
    if test is None and train.name.endswith("_TRAIN.ts"):
        beside = train.with_name(train.name.removesuffix("_TRAIN.ts") + "_TEST.ts")
        test = beside if beside.is_file() else None
    files = [train] if test is None else [train, Path(test)]
    for file in files:
        if not file.is_file():
            raise DataNotFoundError(f"there is no file {file}")
    parts = [read_file(file) for file in files]
    for part in parts:
        part.refuse_doubts()
    name = train.name.removesuffix(".ts").removesuffix("_TRAIN")
    data = assemble(name, parts[0], parts[1] if len(parts) > 1 else None)
    return replace(data, origin=str(train))


def prepare(source: Source, *, check: bool = True) -> Dataset:
    """Parse the raw files, check them and bring them into shape."""
    train, test = source.read("TRAIN"), source.read("TEST")
    data = replace(assemble(source.name, train, test), origin=source.origin, source_hash=source.digest())
    entry = manifest().get(source.name)
    if entry is None or entry.differences(data):  # a header may be wrong where the series are known to be right
        train.refuse_doubts()
        test.refuse_doubts()
    _check(data, Path(source.origin), check)
    return data


def differences(data: Dataset) -> list[str]:
    """What is not as the archive states it; nothing for a set of unknown size."""
    entry = manifest().get(data.name)
    return [] if entry is None else entry.differences(data)


def problems(name: str, data_dir: Path | None, cache_dir: Path) -> tuple[Dataset | None, list[str]]:
    """What is wrong with a prepared set, in words; and the set where it can be read."""
    try:
        check_name(name)
        path = cache.cache_file(name, cache_dir)
        if not path.is_file():
            return None, [f"it is not prepared: there is no {path}"]
        data = cache.read(path)
        source = None if data_dir is None else in_directory(name, data_dir)
    except DataError as error:
        return None, [str(error)]
    stale = [f"the files in {source.origin} are others now"] if source and source.digest() != data.source_hash else []
    return data, stale + differences(data)


def _check(data: Dataset, where: Path, check: bool) -> None:
    if check and (found := differences(data)):
        raise DataMismatchError(
            f"{where}: not the archive's {data.name}: {'; '.join(found)}. The files are truncated or of another "
            f"edition; check=False (--no-check) takes them as they are"
        )


def _not_found(name: str, directory: Path | None, reason: str | None, offline: bool) -> str:
    if reason:
        return f"{reason}, and its raw files are not to be had to make it anew; name their folder by --data-dir"
    if name.startswith("lra-"):
        return f"{name} is no set of time series; primaldual.data.sequences.load has the Long Range Arena's"
    places = [f"in {directory}"] if directory else []
    places += ["in the cache", "in the aeon package", *([] if offline else ["among the sets that aeon can download"])]
    hint = "." if name in manifest() else did_you_mean(name, manifest(), most=3)
    where = "" if directory else f" Name the folder of {name}.zip by --data-dir or {DATA_VARIABLE}."
    return f"there is no data set {name} {' or '.join(places)}{hint}{where}"
