"""Packages that only the demo needs."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType

from .recipe import DemoError


def extra(module: str) -> ModuleType:
    """Import an optional package, or say how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package's own imports, nothing that a reader could act on
            return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise DemoError(f'the demo needs {package}: pip install "primaldual[demo]"') from None
