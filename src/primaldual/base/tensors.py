"""Tensors in a file, JSON beside them, and a checksum of both: whole, and as it was written, or an error.

A file is safetensors. Its header holds the JSON as "primaldual", and the checksum in it. No memory is taken for more
than the file holds, and nothing in it is run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from .files import write_bytes

Tensors = dict[str, Tensor]

CHECKSUM = "checksum"


class DamagedFileError(ValueError):
    """A file is not as it was written, or no file of this kind."""


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """The whole file, or the one that was there before."""
    held: Tensors = {}
    places = set[int]()
    for name, x in tensors.items():
        x = x.detach().cpu().contiguous()
        held[name] = x.clone() if x.data_ptr() in places else x  # weights that a model has twice
        places.add(x.data_ptr())
    said = json.dumps({CHECKSUM: _digest(about, held)} | dict(about))
    # one entry, for safetensors has no order of several; and not save_file, which has scratch files of its own
    write_bytes(path, save(held, metadata={"primaldual": said}))


def read(path: Path, *, older: Collection[str] | None = None) -> tuple[Tensors, dict[str, Any]]:
    """What `write` wrote; a `DamagedFileError` where it is anything else.

    Args:
        path: of the file; one that is not there is a FileNotFoundError.
        older: what the JSON of files from before there were checksums may say, where they are taken, too.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        tensors, about = _contents(path)
        expected = about.pop(CHECKSUM, None)
        found = _digest(about, tensors)
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        # RecursionError is a RuntimeError
        raise DamagedFileError(f"{path} is damaged, or no file of primaldual ({_said(error)})") from None
    if expected is None and (older is None or not set(about) <= set(older)):
        raise DamagedFileError(f"{path} is damaged or of an older version: it has no checksum")
    if expected is not None and expected != found:
        raise DamagedFileError(f"{path} is damaged: it is not what its checksum was made of")
    return tensors, about


def _contents(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and the JSON beside them."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:  # the name is no UTF-8, which safetensors needs to open a file
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        return load(raw), json.loads(header["__metadata__"]["primaldual"])
    with safe_open(name, framework="pt") as stream:
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118  not a dict
        return tensors, json.loads(stream.metadata()["primaldual"])


def _digest(about: Mapping[str, Any], tensors: Tensors) -> str:
    """SHA-256 of all that a file says."""
    digest = hashlib.sha256(json.dumps(about).encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
