"""Fitted estimators in a file: tensors as safetensors, the rest as JSON in its header. Nothing is pickled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from ..primal import Spec
from ..training.store import read, write

FORMAT = 1
"""To be raised when older files can no longer be read."""

Arrays = dict[str, np.ndarray]


class SavedEstimatorError(ValueError):
    """A file is damaged, or not what `save` of this estimator wrote."""


def write_estimator(path: Path, estimator: str, arrays: Arrays, about: dict[str, Any]) -> None:
    """Keep arrays, and what goes into JSON, under the name of an estimator; the file is whole or not there."""
    head = {"format": FORMAT, "estimator": estimator, "sha256": _digest(arrays)}
    write(path, {name: torch.tensor(a) for name, a in arrays.items()}, head | about)


def read_estimator(path: Path, estimator: str) -> tuple[Arrays, dict[str, Any]]:
    """What `write_estimator` wrote for this estimator."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        tensors, about = read(path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise SavedEstimatorError(f"{path} is damaged, or was not written by {estimator}.save: {error}") from None
    if not isinstance(about, dict) or "estimator" not in about:
        raise SavedEstimatorError(f"{path} was not written by {estimator}.save")
    if about["estimator"] != estimator:
        raise SavedEstimatorError(f"{path} holds a {about['estimator']}: load it with {about['estimator']}.load")
    if about["format"] != FORMAT:
        raise SavedEstimatorError(f"{path} is of format {about['format']!r}; this version of primaldual reads {FORMAT}")
    arrays = {name: x.numpy() for name, x in tensors.items()}
    if about["sha256"] != _digest(arrays):
        raise SavedEstimatorError(f"{path} is damaged: its weights are not those that were saved")
    return arrays, about


def to_json(value: Any) -> Any:
    """A parameter as plain JSON types; a random generator, whose state is not kept, is None."""
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {"mapping": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, np.random.RandomState):
        return None
    return plain(value)


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, dict):
        return dict(value["mapping"]) if "mapping" in value else Spec.from_dict(value)
    return value


def plain(value: Any) -> Any:
    """A number of numpy, such as a grid search gives, as one of Python.

    >>> plain(np.int64(3)), plain("bn")
    (3, 'bn')
    """
    return value.item() if isinstance(value, np.generic) else value


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
