"""A stand-in for a CUDA graph's capture, where there is no GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from primaldual.kernels import kept, launching


@contextmanager
def capture() -> Iterator[None]:
    """Inside, whatever asks is told that a graph is captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "capturing", lambda device: True)
        patch.setattr(launching, "_stream", lambda x: 1)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield
