"""Prepared sets on disk: one safetensors file each, read with torch alone."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..base.files import write_bytes
from .dataset import Dataset, Split
from .errors import DataError
from .sources import PARSER_VERSION


class CacheError(DataError):
    """A prepared file is damaged, was written by another version, or cannot be kept."""


def cache_file(name: str, directory: Path) -> Path:
    """Where a set is kept."""
    return directory / "timeseries" / f"{name}.safetensors"


def cached_names(directory: Path) -> list[str]:
    """The sets that are there, damaged or not."""
    return sorted(path.stem for path in (directory / "timeseries").glob("*.safetensors"))


def write(data: Dataset, path: Path) -> None:
    """All or nothing: a reader sees the old file or the new one, whole."""
    about = {
        "version": PARSER_VERSION, "name": data.name, "kind": data.kind, "classes": data.classes,
        "longest": data.longest, "notes": data.notes, "origin": data.origin, "source_hash": data.source_hash,
        "hash": data.hash,
    }  # fmt: skip
    try:
        write_bytes(path, save(dict(data.tensors()), metadata={"primaldual": json.dumps(about)}))
    except (OSError, SafetensorError) as error:
        raise CacheError(
            f"{path} cannot be written ({error}); choose another cache directory by PRIMALDUAL_CACHE"
        ) from None


def read(path: Path) -> Dataset:
    """A prepared set, checked against its own hash."""
    try:
        with safe_open(path, framework="pt") as stream:
            about = json.loads((stream.metadata() or {})["primaldual"])
            if about["version"] != PARSER_VERSION:
                raise CacheError(f"{path} was prepared by version {about['version']}; this one is {PARSER_VERSION}")
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118  not a dict
        train, test = (Split(*(tensors[f"{part}.{n}"] for n in ("x", "lengths", "y"))) for part in ("train", "test"))
        data = Dataset(
            about["name"], about["kind"], tuple(about["classes"]), train, test, tensors["mean"], tensors["std"],
            about["longest"], tuple(about["notes"]), about["origin"], about["source_hash"],
        )  # fmt: skip
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise CacheError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    if data.hash != about["hash"]:
        raise CacheError(f"{path} is damaged: its contents do not have the hash that was written with them")
    return data
