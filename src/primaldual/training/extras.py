"""Packages that are needed for one thing only."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType


class MissingPackageError(ImportError):
    """A package is not installed; the message says which, and what for."""


def needed(module: str, package: str, purpose: str) -> ModuleType:
    """Import a module of an optional package, or say what to install."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package's own imports, nothing that a reader could act on
            return import_module(module)
    except ModuleNotFoundError:
        raise MissingPackageError(f"{purpose} needs {package}: pip install {package}") from None
