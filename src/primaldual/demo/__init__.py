"""The framework at work in under three minutes: derive, check, train, report."""

from .results import Results
from .run import run_demo
from .settings import DemoError, Settings

__all__ = ["DemoError", "Results", "Settings", "run_demo"]
