"""The command line: parse, call, print."""

from .main import app

__all__ = ["app"]
