"""The command line: parse, call, print."""

from . import bench, build, certify, data, reproduce, sweep, train
from .main import app

__all__ = ["app", "bench", "build", "certify", "data", "reproduce", "sweep", "train"]
