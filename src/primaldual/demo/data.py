"""BasicMotions: 40 training and 40 test series of 6 channels and 100 steps, four activities; shipped inside aeon."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from .extras import extra


class Data(NamedTuple):
    """Series [n, length, channels], standardised per channel by the training statistics, and class indices [n]."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]

    def first(self, name: str) -> int:
        """The index of the first test series of a class."""
        return int((self.test_labels == self.classes.index(name)).nonzero()[0])

    def sha256(self) -> str:
        """A fingerprint of everything that a run sees."""
        digest = hashlib.sha256()
        for tensor in (self.train, self.train_labels, self.test, self.test_labels):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


def load() -> Data:
    """The archive's own train/test split; no network."""
    read = extra("aeon.datasets").load_basic_motions
    (train, train_names), (test, test_names) = read(split="train"), read(split="test")
    classes = tuple(sorted({str(name) for name in train_names}))
    # [n, channels, length]; the statistics are pooled over series and steps, of the training set alone
    train, test = torch.as_tensor(train), torch.as_tensor(test)
    mean, std = train.mean((0, 2), keepdim=True), train.std((0, 2), keepdim=True)

    def prepare(series: Tensor) -> Tensor:
        return ((series - mean) / std).transpose(1, 2).float().contiguous()

    def index(names: list[str]) -> Tensor:
        return torch.tensor([classes.index(str(name)) for name in names])

    return Data(prepare(train), index(train_names), prepare(test), index(test_names), classes)
