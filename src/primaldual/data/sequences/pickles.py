"""Pickled arrays, numbers, strings, lists and dictionaries; nothing else, so that reading a file runs no code of it."""

from __future__ import annotations

import codecs
import io
import pickle
from typing import Any

import numpy as np


class PickleError(ValueError):
    """The bytes are no whole pickle, or one of more than arrays."""


def arrays_only(content: bytes) -> Any:
    """What is pickled, by Python 2 too, whose strings become bytes."""
    try:
        return _Arrays(io.BytesIO(content), encoding="bytes").load()
    except PickleError:
        raise
    except Exception as error:  # broken bytes lead to any
        raise PickleError(f"it is no whole pickle ({type(error).__name__}: {error})") from None


def _dtype(name: str | bytes, align: int = 0, copy: int = 0) -> np.dtype[Any]:
    """As numpy's, with the arguments as Python 2 wrote them."""
    return np.dtype(name.decode() if isinstance(name, bytes) else name)


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes the bytes of an array."""
    if encoding != "latin1":
        raise PickleError(f"it asks for the encoding {encoding!r}, where arrays are latin1")
    return codecs.encode(text, "latin1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): _encode,
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise PickleError(f"it asks for {module}.{name}, which no array needs; it was not run")
        return _ALLOWED[module, name]
