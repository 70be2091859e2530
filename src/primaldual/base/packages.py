"""Packages that are needed for one thing only."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType


class MissingPackageError(ModuleNotFoundError):
    """A package is not installed; the message says which, what for, and what to install."""


def needed(module: str, package: str, purpose: str, install: str | None = None) -> ModuleType:
    """Import a module of an optional package, or say what to install.

    Args:
        module: to import.
        package: that it belongs to.
        purpose: what needs it, as the message begins.
        install: what pip is to install, such as `"primaldual[demo]"`; the package unless given.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package's own imports, nothing that a reader could act on
            return import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] not in (top, package):
            raise  # the package is there, and something that it needs itself is not
        what = f"{purpose} needs {package}: pip install {install or package}"
        raise MissingPackageError(what, name=package) from None
