"""The command line: parse, call, print."""

from . import bench, certify, data, reproduce, sweep, train
from .main import app

__all__ = ["app", "bench", "certify", "data", "reproduce", "sweep", "train"]
