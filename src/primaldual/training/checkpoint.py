"""Whether a checkpoint is one of a training: what it holds is compared with what the training would keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .loop import Training


LARGEST = 1 << 53
"""Counts beyond it are no counts, and no numbers of a tensor."""


def refusal(training: Training, tensors: dict[str, Tensor], about: dict[str, Any]) -> str | None:
    """Why a training, at its start, cannot go on from these; None where it can."""
    own, state = training.state()
    if missing := set(state) - set(about):
        return f"of an older version: it does not say {', '.join(sorted(missing))}"
    if set(own) != set(tensors):
        return f"damaged: it has other tensors than {', '.join(sorted(own))}"
    for name, x in own.items():
        if (x.shape, x.dtype) != (tensors[name].shape, tensors[name].dtype):
            return f"damaged: {name} is {tensors[name].dtype} {list(tensors[name].shape)}"
    if not _seeds_a_generator(tensors["random"], training.ensemble.generator):
        return "damaged: it has no random state"
    return _misplaced(training, about) or _unhistorical(training, about)


def among(seeds: Any, wanted: Sequence[int]) -> bool:
    """Whether these are seeds, and of those that are wanted."""
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
        return False
    return len(set(seeds)) == len(seeds) and set(seeds) <= set(wanted)


def _misplaced(training: Training, about: dict[str, Any]) -> str | None:
    """Where it says that it stands, if no training stands there."""
    for name in ("epoch", "batch", "step", "evaluated", "seen"):
        if type(about[name]) is not int or not (name == "epoch") <= about[name] < LARGEST:
            return f"damaged: {name} is {about[name]!r}"
    seconds, batches, end = about["seconds"], len(training.ensemble.batches), training.recipe.end
    if not _is_number(seconds) or seconds < 0:
        return f"damaged: seconds are {seconds!r}"
    paces = about["paces"]
    if not isinstance(paces, list) or not all(_is_number(x) and x >= 0 for x in paces):
        return f"damaged: paces are {paces!r}"
    at = about["epoch"] - 1 if training.recipe.unit == "epoch" else about["step"]
    if about["batch"] >= batches or about["step"] != (about["epoch"] - 1) * batches + about["batch"] or at > end:
        return f"damaged: epoch {about['epoch']}, batch {about['batch']}, step {about['step']} of {batches} an epoch"
    if about["evaluated"] > at:
        return f"damaged: evaluated at {about['evaluated']}, which is ahead of {at}"
    return None


def _unhistorical(training: Training, about: dict[str, Any]) -> str | None:
    """What its members cannot have behind them."""
    members = len(training.seeds)
    for name, kinds in (("history", (dict,)), ("active", (bool,)), ("failures", (str, type(None)))):
        found = about[name]
        if not isinstance(found, list) or len(found) != members or not all(isinstance(one, kinds) for one in found):
            return f"damaged: {name} is not one of {members} members"
    for own, history in zip(training.history, about["history"], strict=True):
        if set(history) != set(own) or not all(isinstance(values, list) for values in history.values()):
            return f"damaged: a history of {', '.join(sorted(map(str, history)))}"
        if len({len(values) for values in history.values()}) > 1:
            return "damaged: a history of unequal lengths"
        times = history[training.recipe.unit]
        if not all(type(x) is int for x in times) or times != sorted(set(times)) or times[-1:] > [about["evaluated"]]:
            return f"damaged: a history at {times!r}"
        for part, values in history.items():
            waits = part == "test" and training.recipe.test_at_end
            if not all(_is_number(x) or (x is None and waits) for x in values):
                return f"damaged: a history of {part} that is no numbers"
    return None


def _is_number(x: Any) -> bool:
    """Not every integer of JSON fits into a float."""
    return (type(x) is float and math.isfinite(x)) or (type(x) is int and abs(x) < LARGEST)


def _seeds_a_generator(state: Tensor, like: torch.Generator) -> bool:
    try:
        torch.Generator(like.device).set_state(state)
    except (RuntimeError, TypeError):
        return False
    return True
