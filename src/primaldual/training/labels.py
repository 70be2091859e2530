"""Class labels in JSON and back, of the same type: numbers, words, truth values, times."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, str, type(None))
_TIMES = {one.__name__: one for one in (datetime.datetime, datetime.date, datetime.time)}
LARGEST = 1 << 24
"""Bytes of all labels together: a file that says more is not believed."""


def labels_to_json(labels: np.ndarray) -> dict[str, Any]:
    """An array of labels as plain JSON types.

    >>> labels_to_json(np.array(["2024-05-01"], dtype="datetime64[D]"))
    {'dtype': '<M8[D]', 'values': ['2024-05-01']}
    """
    if labels.dtype.kind in "mM":
        values = labels.astype(str) if labels.dtype.kind == "M" else labels.astype(np.int64)
        return {"dtype": labels.dtype.str, "values": values.tolist()}
    return {"dtype": labels.dtype.str, "values": [label_to_json(one) for one in labels.tolist()]}


def labels_from_json(data: dict[str, Any]) -> np.ndarray:
    """The inverse of `labels_to_json`; a ValueError where it is none."""
    dtype, values = np.dtype(data["dtype"]), [label_from_json(one) for one in data["values"]]
    if dtype.itemsize * len(values) > LARGEST or dtype.kind not in "biufUSOmM" or dtype.shape:
        raise ValueError(f"labels of type {data['dtype']!r}")
    if dtype.kind == "O":
        labels = np.empty(len(values), dtype=object)
        labels[:] = values
        return labels
    return np.array(values, dtype=dtype)


def label_to_json(value: Any) -> Any:
    """One label; a TypeError where there is no way back."""
    value = value.item() if isinstance(value, np.generic) and not isinstance(value, np.datetime64) else value
    if type(value) in _PLAIN:
        return value
    if type(value) in _TIMES.values():
        return {type(value).__name__: value.isoformat()}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, np.datetime64):
        return {"datetime64": [str(value), value.dtype.str]}
    raise TypeError(
        f"a label of type {type(value).__name__} cannot be kept in a file; use numbers, words or times, got {value!r}"
    )


def label_from_json(value: Any) -> Any:
    """The inverse of `label_to_json`."""
    if not isinstance(value, dict):
        if type(value) not in _PLAIN:
            raise ValueError(f"a label {value!r}")
        return value
    ((kind, text),) = value.items()
    if kind == "bytes":
        return bytes.fromhex(text)
    if kind == "datetime64":
        return np.array(text[0], dtype=text[1])[()]
    return _TIMES[kind].fromisoformat(text)
