"""One training step to measure: a set's model, random series of its sizes, and how many members train together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..data import Split, manifest
from ..paper.families import blank
from ..paper.job import as_in_paper
from ..paper.recipes import recipe_for, sizes_of
from ..primal import Primal
from ..training import Recipe, SeriesTask, Task
from .rivals import SeriesLoop

SHORTEST = {"JapaneseVowels": 7, "SpokenArabicDigits": 4}
"""The sets with series of unequal lengths, and their shortest one; drawn evenly from there to the longest."""


@dataclass(frozen=True)
class TrainingCase:
    """What is measured: a set's model, and how many of it train together.

    Args:
        dataset: by name; series are random, of the published sizes.
        mechanism: by name, with the paper's β and scales for this set.
        impl: the executor of the attention.
        seeds: how many members.
        dtype: "bfloat16" (weights in float32; the rival trains under autocast) or "float32".
        batch: series of a step, of every member; the recipe's unless given.
        steps: where series are cut; None for nowhere.

    >>> TrainingCase("Heartbeat", "bn").config().length
    405
    """

    dataset: str
    mechanism: str = "softmax"
    impl: str = "auto"
    seeds: int = 5
    dtype: str = "bfloat16"
    batch: int | None = None
    steps: int | None = None

    @property
    def primal(self) -> Primal:
        """The mechanism as the paper sets it for this set."""
        return as_in_paper(self.dataset, self.mechanism)

    @property
    def length(self) -> int:
        """Of every series, after padding."""
        length = manifest()[self.dataset].length
        return length if self.steps is None else min(self.steps, length)

    @property
    def recipe(self) -> Recipe:
        """The paper's. One epoch: the table of the optimiser's coefficients is short, a step is the same."""
        recipe = recipe_for(blank(self.dataset))
        size = min(self.batch or recipe.batch_size, manifest()[self.dataset].cases[0][0])
        return replace(recipe, batch_size=size, dtype=self.dtype, epochs=1)

    @property
    def full_size(self) -> bool:
        """Whether batch and length are those of the paper's code."""
        entry = manifest()[self.dataset]
        return self.length == entry.length and self.recipe.batch_size == recipe_for(blank(self.dataset)).batch_size

    def config(self, impl: str | None = None) -> Any:
        """The model; a ValueError where there is none."""
        config = sizes_of(self.recipe).config(blank(self.dataset), self.primal, impl or self.impl)
        self.primal.training_set.head_scales(config.heads)
        return replace(config, length=self.length)

    def task(self, data: Any) -> Task:
        """What all members train on."""
        return SeriesTask(data, self.primal, sizes_of(self.recipe), impl=self.impl)

    def rival(self, data: Any, device: torch.device) -> Callable[[Tensor], None]:
        """What a step is measured against: a function of the rows of a batch."""
        return SeriesLoop(self, data, device)

    def about(self, data: Any) -> dict[str, Any]:
        """What a record says of the cases."""
        return {
            "channels": data.channels, "outputs": data.outputs, "series": len(data.train),
            "padded": data.train.padding is not None,
        }  # fmt: skip

    @property
    def attended(self) -> int:
        """Sequences that the attention takes at once: of all members."""
        return self.seeds * self.recipe.batch_size

    @property
    def masked(self) -> bool:
        """Whether the attention has a mask of padding."""
        return self.dataset in SHORTEST and sizes_of(self.recipe).encoder == "mvts"

    def data(self) -> Any:
        """Random training series of the set's sizes, and no test series."""
        like, entry = blank(self.dataset), manifest()[self.dataset]
        draw, cases = torch.Generator().manual_seed(0), entry.cases[0][0]
        lengths = torch.full((cases,), self.length)
        if self.dataset in SHORTEST:
            lengths = torch.randint(min(SHORTEST[self.dataset], self.length), self.length + 1, (cases,), generator=draw)
            lengths[0] = self.length
        x = torch.randn(cases, self.length, entry.channels, generator=draw)
        x.masked_fill_((torch.arange(self.length) >= lengths[:, None]).unsqueeze(-1), 0.0)
        y = (
            torch.randint(entry.classes, (cases,), generator=draw)
            if entry.classes
            else torch.randn(cases, generator=draw)
        )
        none = Split(x[:0], lengths[:0], y[:0])
        return replace(like, train=Split(x, lengths, y), test=none, longest=self.length)
