"""The command line: parse, call, print."""

from . import bench, certify, data, reproduce, train
from .main import app

__all__ = ["app", "bench", "certify", "data", "reproduce", "train"]
