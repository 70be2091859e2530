"""Settings that every test shares."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from support.interpreter import HOPPER

settings.register_profile("primaldual", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("primaldual")
torch.set_num_threads(1)  # the tensors are tiny: threads cost more than they bring


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords hold the names of folders, too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=HOPPER)
def on_hopper() -> Iterator[None]:
    """Kernels as they are compiled for Hopper take tensors of the CPU."""
    from support.hopper import hopper

    with hopper():
        yield


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Of float32 products on a GPU, in the reference too."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
