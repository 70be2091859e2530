"""One fit as it is asked for, and the name of its record."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...data.ts import Kind
from .methods import Method, is_seeded, stated
from .protocol import Protocol
from .sets import Stated

VERSION = 1
"""To be raised when the same job is done in another way: with other splits, or other preparation."""


@dataclass(frozen=True)
class Job:
    """A set, a method, a split and a seed.

    Args:
        dataset, digest, kind, size: of the set.
        method, path, settings: its name, its class and what the constructor is given.
        protocol: how splits are made, with everything that changes them.
        split, seed: from 0.
        parameters: of the estimator, its defaults among them.
    """

    dataset: str
    digest: str
    kind: Kind
    size: int
    method: str
    path: str
    settings: tuple[tuple[str, Any], ...]
    protocol: Protocol
    split: int
    seed: int
    parameters: dict[str, str] = field(hash=False)

    def identity(self) -> dict[str, Any]:
        """All that the result follows from."""
        return {
            "version": VERSION, "set": self.dataset, "data": self.digest, "class": self.path,
            "parameters": self.parameters, "protocol": self.protocol.identity(), "split": self.split,
            "seed": self.seed,
        }  # fmt: skip

    @property
    def key(self) -> str:
        """A hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def place(self) -> str:
        """Where its files lie: in a folder for every set, and in that for every method."""
        folders = (re.sub(r"[^\w.-]", "_", name) for name in (self.dataset, self.method))
        return f"{'/'.join(folders)}/split{self.split}-seed{self.seed}-{self.key}"

    def text(self) -> str:
        """For a reader."""
        return f"{self.dataset}, {self.method}, split {self.split}, seed {self.seed}"


def jobs(data: Iterable[Stated], methods: Sequence[Method], protocol: Protocol, seeds: int) -> Iterator[Job]:
    """Set by set, and in a set split by split; a method without a random state has the first seed alone."""
    for one in data:
        for split in range(protocol.count):
            for seed in range(seeds):
                for method in methods:
                    path = method.path(one.kind)
                    if path is not None and (seed == 0 or is_seeded(path)):
                        yield Job(
                            one.name, one.digest, one.kind, one.size, method.name, path, method.settings, protocol,
                            split, seed, stated(path, method.settings),
                        )  # fmt: skip
