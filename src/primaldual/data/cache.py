"""Prepared sets on disk: one safetensors file each, read with torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..base import tensors as files
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
        files.write(path, dict(data.tensors()), about)
    except (OSError, SafetensorError) as error:
        raise CacheError(
            f"{path} cannot be written ({error}); choose another cache directory by PRIMALDUAL_CACHE"
        ) from None


def read(path: Path) -> Dataset:
    """A prepared set: that of the file's name, checked against its own hash."""
    try:
        tensors, about = files.read(path, older=(*_WORDS, "version", "classes", "notes"))
    except (files.DamagedFileError, OSError) as error:
        raise CacheError(str(error)) from None
    if about.get("version") != PARSER_VERSION:
        raise CacheError(f"{path} was prepared by version {about.get('version')!r}; this one is {PARSER_VERSION}")
    if problem := _problem(tensors, about):
        raise CacheError(f"{path} is damaged: {problem}")
    if about["name"] != path.stem:
        raise CacheError(f"{path} holds {about['name']}: it was renamed")
    train, test = (Split(*(tensors[f"{part}.{n}"] for n in ("x", "lengths", "y"))) for part in ("train", "test"))
    data = Dataset(
        about["name"], about["kind"], tuple(about["classes"]), train, test, tensors["mean"], tensors["std"],
        about["longest"], tuple(about["notes"]), about["origin"], about["source_hash"],
    )  # fmt: skip
    if data.hash != about["hash"]:
        raise CacheError(f"{path} is damaged: its contents do not have the hash that was written with them")
    return data


_WORDS = {"name": str, "kind": str, "origin": str, "source_hash": str, "hash": str, "longest": int}


def _problem(tensors: dict[str, Tensor], about: dict[str, Any]) -> str | None:
    """What keeps these from being a set, in words."""
    for name, kind in _WORDS.items():
        if type(about.get(name)) is not kind:
            return f"{name} is {about.get(name)!r}"
    for name in ("classes", "notes"):
        if not isinstance(about.get(name), list) or not all(type(one) is str for one in about[name]):
            return f"{name} are {about.get(name)!r}"
    if about["kind"] not in ("classification", "regression") or (about["kind"] == "regression") == bool(
        about["classes"]
    ):
        return f"it is a {about['kind']} set with {len(about['classes'])} classes"
    wanted = {f"{part}.{n}" for part in ("train", "test") for n in ("x", "lengths", "y")} | {"mean", "std"}
    if set(tensors) != wanted:
        return f"it holds {sorted(tensors)}"
    targets = torch.float32 if about["kind"] == "regression" else torch.int64
    channels = tensors["mean"].shape
    for part in ("train", "test"):
        x, lengths, y = (tensors[f"{part}.{n}"] for n in ("x", "lengths", "y"))
        if (
            x.dim() != 3
            or x.shape[2:] != channels
            or x.shape[1] != tensors["train.x"].shape[1]
            or x.dtype != torch.float32
        ):
            return f"the {part} series are {x.dtype} {list(x.shape)}"
        if lengths.dtype != torch.int64 or y.dtype != targets or not lengths.shape == y.shape == x.shape[:1]:
            return f"the {part} series have lengths {list(lengths.shape)} and targets {y.dtype} {list(y.shape)}"
        if len(x) and not (lengths.min() >= 1 and lengths.max() <= x.shape[1]):
            return f"the {part} series have {int(lengths.min())} to {int(lengths.max())} of {x.shape[1]} steps"
        if len(x) and about["classes"] and not (y.min() >= 0 and y.max() < len(about["classes"])):
            return f"the {part} series are of classes {int(y.min())} to {int(y.max())} of {len(about['classes'])}"
    if not len(tensors["train.x"]) or not tensors["train.x"].shape[1]:
        return "there are no training series"
    if any(tensors[n].dtype != torch.float64 or tensors[n].shape != channels for n in ("mean", "std")):
        return "mean and deviation are not one number per channel"
    return None
