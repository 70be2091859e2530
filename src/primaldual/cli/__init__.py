"""The command line: parse, call, print."""

from . import certify
from .main import app

__all__ = ["app", "certify"]
