"""How many threads torch works with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Inside, at most so many: threads that wait for each other cost more than they bring where others work too."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
