"""Fitted estimators in a file: the format of every trained model, with the parameters beside it. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..primal import Spec
from ..training.labels import label_from_json, label_to_json
from ..training.model_file import ModelFileError
from ..training.predictor import Predictor


class SavedEstimatorError(ModelFileError):
    """A file is damaged, or not what `save` of this estimator wrote."""


def write_estimator(path: Path, estimator: str, predictor: Predictor, about: dict[str, Any]) -> None:
    """Keep what predicts, and what goes into JSON, under the name of an estimator; the file is whole or not there."""
    replace(predictor, about={"estimator": estimator} | about).save(path)


def read_estimator(path: Path, estimator: str) -> tuple[Predictor, dict[str, Any]]:
    """What `write_estimator` wrote for this estimator."""
    try:
        predictor = Predictor.load(path)
    except ModelFileError as error:
        raise SavedEstimatorError(str(error)) from None
    about = dict(predictor.about)
    if "estimator" not in about:
        raise SavedEstimatorError(f"{path} was not written by {estimator}.save; primaldual predict takes it")
    if about["estimator"] != estimator:
        raise SavedEstimatorError(f"{path} holds a {about['estimator']}: load it with {about['estimator']}.load")
    return predictor, about


def to_json(value: Any) -> Any:
    """A parameter as plain JSON types; a random generator, whose state is not kept, is None."""
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {"mapping": [[label_to_json(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, np.random.RandomState):
        return None
    return plain(value)


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, dict):
        if "mapping" in value:
            return {label_from_json(key): item for key, item in value["mapping"]}
        return Spec.from_dict(value)
    return value


def plain(value: Any) -> Any:
    """A number of numpy, such as a grid search gives, as one of Python.

    >>> plain(np.int64(3)), plain("bn")
    (3, 'bn')
    """
    return value.item() if isinstance(value, np.generic) else value


def read_history(given: Any) -> list[dict[str, list[float]]]:
    """Of every model, as a file has it."""
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError(f"a history {given!r}")
    return given


def read_metadata(given: Any, channels: int) -> dict[str, Any]:
    """What aeon knows of the training series."""
    flags, counts = ("multivariate", "missing_values", "unequal_length"), ("n_cases", "n_channels", "n_timepoints")
    if not isinstance(given, dict) or set(given) != {*flags, *counts}:
        raise ValueError(f"metadata {given!r}")
    if not all(type(given[name]) is bool for name in flags) or given["n_channels"] != channels:
        raise ValueError(f"metadata {given!r}")
    if not all(type(given[name]) is int or (name == "n_timepoints" and given[name] is None) for name in counts):
        raise ValueError(f"metadata {given!r}")
    return given
