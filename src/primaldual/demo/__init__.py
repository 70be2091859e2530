"""The framework at work in under three minutes: derive, check, train, report."""

from .recipe import DemoError, Recipe
from .results import Results
from .run import run_demo

__all__ = ["DemoError", "Recipe", "Results", "run_demo"]
