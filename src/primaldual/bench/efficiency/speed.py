"""What users feel: milliseconds of a training step and of inference, of all mechanisms in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ...data.sequences import Cases, Documents, SequenceSet
from ...primal import mechanism
from ...training import Ensemble, Recipe, SequenceTask
from ..measure import median_and_range, reason
from ..session import Measurement
from ..timing import Contestant, Step, Timed, in_turns
from .setting import CLASSES, Setting
from .step import BYTES, ModelStep

BATCHES = 4
"""Different batches of the training steps, taken in turns."""

DOCUMENTS = 128
"""Random documents that pairs are made of."""


def speed(names: tuple[str, ...], setting: Setting, device: torch.device, repeats: int, budget: float) -> Measurement:
    """By mechanism: seconds of a step, tokens per second, and the ratio to the first; or why it could not be measured.

    A training step is one of `primaldual.training.Ensemble` with one member, as runs are trained: loss, gradients and
    AdamW. Inference is the model alone. Both are CUDA graphs on a GPU.
    """
    prepare = _trained if setting.trains else _inferred
    timed: dict[str, Timed] = {}
    found: Measurement = {}
    for name in names:
        try:
            timed[name] = prepare(name, setting, device)
        except Exception as error:  # one mechanism may not fit where others do
            found[name] = {"error": reason(error)}
    rounds = in_turns(list(timed.values()), repeats, budget) if timed else []
    tokens = 2 * setting.pairs * setting.length
    for place, name in enumerate(timed):
        record = median_and_range("seconds", [times[place] for times in rounds])
        record |= {"tokens_per_second": round(tokens / record["seconds"])}
        if names[0] in timed:
            record |= median_and_range("ratio", [times[place] / times[0] for times in rounds])
        found[name] = record
    return {name: found[name] for name in names}


def _trained(name: str, setting: Setting, device: torch.device) -> Timed:
    """Of an ensemble of one member. Its steps are captured already, where they can be."""
    dtype = "bfloat16" if setting.dtype == torch.bfloat16 else "float32"
    recipe = Recipe(setting.sizes, steps=1000, batch_size=setting.pairs, optimizer="adamw", clip=None, dtype=dtype)
    task = SequenceTask(random_pairs(setting), mechanism(name), setting.sizes)
    ensemble = Ensemble(task, recipe, [0], device)
    rows = torch.arange(BATCHES * setting.pairs, device=device).view(BATCHES, 1, -1)
    steps: list[Step] = [partial(ensemble.step, batch) for batch in rows]
    return Timed(Contestant(name, steps, 0), "eager", device)


def _inferred(name: str, setting: Setting, device: torch.device) -> Timed:
    step: Callable[[], object] = ModelStep(name, setting, device)
    return Timed(Contestant(name, [step], 0), "captured" if device.type == "cuda" else "eager", device)


def random_pairs(setting: Setting) -> SequenceSet:
    """Pairs of documents of random bytes, all of the model's length."""
    draw = np.random.default_rng(0)
    raw = draw.integers(0, BYTES - 1, DOCUMENTS * setting.length, dtype=np.uint8)
    documents = Documents(raw, np.arange(DOCUMENTS + 1) * setting.length)
    pairs = BATCHES * setting.pairs
    cases = Cases(draw.integers(0, DOCUMENTS, (pairs, 2)), draw.integers(0, CLASSES, pairs))
    return SequenceSet(
        "random", "Random", documents, {"train": cases}, tuple(map(str, range(CLASSES))), setting.length, BYTES,
        hash="random",
    )  # fmt: skip
