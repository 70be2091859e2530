"""What is to be learned: cases, a model, a loss and a metric."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.randomness import DrawingFrom
from ..primal import Primal, Spec, as_primal
from .recipe import Recipe, canonical

if TYPE_CHECKING:
    from .members import Members
    from .model_file import Models
    from .stacked import Stacked

Batch = tuple[Tensor | None, ...]
"""Tensors with cases first; None for one that these cases do not need, such as a mask that hides nothing."""

Loss = Tensor | tuple[Tensor, Tensor]
"""The mean loss; or a sum and what it is to be divided by, where cases do not weigh alike."""


class Metric(NamedTuple):
    """What is reported, and whether more of it is better."""

    name: str
    more_is_better: bool


class Task(ABC):
    """Something to learn. A task of one's own gives `name`, `parts`, `build` and `loss`; the rest has defaults.

        class Bytes(Task):
            name, metric = "bytes", Metric("bits per byte", more_is_better=False)

            def __init__(self, text):
                self.parts = {"train": (text[:900],), "test": (text[900:],)}

            def build(self):
                return MyModel()

            def loss(self, model, text):
                return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

            def finish(self, total, count):
                return total / count / math.log(2)

    Its public attributes, and those of the model's modules, tell its runs from others: they enter the key.

    Attributes:
        name: what to call it.
        metric: what `finish` gives.
        parts: cases by the name of their part: "train", and what is evaluated, such as "test". A part "validation"
            chooses the weights, as a recipe's validation share does.
        sizes: what a recipe's `model` must be; None for a model that has no sizes to choose.
        mechanism: of the model's attention, or its name, for the record; None where that is for the model to say.
        precise: parameters and buffers with one of these in their name are used in float32 where the rest is bfloat16.
        left_out: ends of the names of buffers that nothing is computed with.
        balanced: whether the loss weighs classes alike.
        evaluated_at_once: cases.
    """

    name: str
    metric: Metric = Metric("loss", more_is_better=False)
    parts: Mapping[str, Batch]
    sizes: Spec | None = None
    mechanism: str | Primal | None = None
    precise: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    balanced: bool = False
    evaluated_at_once: int = 256

    @abstractmethod
    def build(self) -> nn.Module:
        """A model with its initial weights; torch's random numbers are those of the member's seed."""

    @abstractmethod
    def loss(self, model: nn.Module, *batch: Any) -> Loss:
        """Of one model on the tensors of a batch: what is trained on."""

    def score(self, model: nn.Module, *batch: Any) -> tuple[Tensor, Tensor | int]:
        """What the metric is made of: a sum over the batch, and a count; the loss unless a task says otherwise."""
        return as_sum(self.loss(model, *batch), cases(batch))

    def finish(self, total: Tensor, count: Tensor | int) -> Tensor:
        """The metric of a part from the sum and the count of its batches."""
        return total / count

    def lengths(self, part: str) -> Tensor | None:
        """[cases], where cases have lengths of their own; batches are then of similar ones, and `cut`."""
        return None

    def cut(self, length: int, *batch: Any) -> Batch:
        """A batch whose cases are no longer: tensors [cases, steps, …] with as many steps as the first are."""
        steps = next(x.shape[1] for x in batch if x is not None and x.dim() > 1)
        return tuple(x[:, :length] if x is not None and x.dim() > 1 and x.shape[1] == steps else x for x in batch)

    def take(self, tensors: Batch, rows: Tensor | slice, length: int | None = None) -> Batch:
        """These rows of a part's tensors as `loss` and `score` take them, cut to a length if one is given."""
        whole = tensors if length is None else self.cut(length, *tensors)
        return tuple(None if x is None else x[rows] for x in whole)

    def classes(self) -> Tensor | None:
        """[cases] of the training part, where what a recipe holds out is to have a share of every class."""
        return None

    def tensors(self, part: str, dtype: torch.dtype, device: torch.device) -> Batch:
        """A part as the model takes it."""
        return tuple(
            None if x is None else x.to(device, dtype) if x.is_floating_point() else x.to(device)
            for x in self.parts[part]
        )

    def members(self, weights: Stacked, train: Batch) -> Members:
        """How members compute: in turn, unless a task has a way for all of them at once."""
        from .members import InTurn

        return InTurn(self, weights)

    def decays(self, name: str, shape: torch.Size) -> bool:
        """Whether a recipe's weight decay is for this parameter, too."""
        return True

    def speed(self, cases_per_second: float) -> dict[str, float]:
        """What a record says of the speed of the training beside the time of a step, such as words per second."""
        return {}

    def deliver(self, model: nn.Module) -> nn.Module:
        """A trained model as its user gets it."""
        return model

    def kept(self, model: nn.Module) -> Models | None:
        """A delivered model as it goes to a file, with what its user needs beside its weights; None for these alone."""
        return None

    @cached_property
    def hash(self) -> str:
        """SHA-256 of all cases, and of their lengths."""
        digest = hashlib.sha256()
        for part, tensors in sorted(self.parts.items()):
            for i, x in enumerate((*tensors, self.lengths(part))):
                if x is None:
                    continue
                digest.update(json.dumps([part, i, str(x.dtype), list(x.shape)]).encode())
                digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        return digest.hexdigest()

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the model and the task are, for the record and its key: their classes and public attributes, in text.

        What else the result follows from, such as a constant in a function, a task of one's own should add.
        """
        modules = {name: described(module) for name, module in built(self, 0).named_modules()}
        return {"settings": described(self), "modules": modules}

    def identity(self) -> dict[str, Any]:
        """What a key has of it."""
        what: dict[str, Any] = {"task": {"name": self.name, "hash": self.hash} | self.about}
        return what if self.stated is None else what | {"mechanism": self.stated}

    def recipe_in_key(self, recipe: Recipe) -> dict[str, Any]:
        """What a key has of the recipe."""
        return canonical(recipe)

    @property
    def stated(self) -> dict[str, Any] | None:
        """The mechanism in JSON."""
        return None if self.mechanism is None else as_primal(self.mechanism).to_dict()

    def data(self) -> dict[str, Any]:
        """What a record says of the cases."""
        return {"name": self.name, "hash": self.hash} | {part: cases(batch) for part, batch in self.parts.items()}


def built(task: Task, seed: int) -> nn.Module:
    """A task's model with the initial weights of a seed, on the CPU; the caller's random state is left alone."""
    with DrawingFrom(torch.Generator().manual_seed(seed)):
        return task.build()


def described(thing: Any) -> str:
    """The class of a task or a module and its public attributes (of a task those of its class, too), as code.

    Left out are tensors, other modules, what a `Task` says of itself elsewhere, and what has no text of its own; of a
    long text there is the hash.

    >>> described(nn.Dropout(0.1))
    'Dropout(p=0.1, inplace=False)'
    """
    words = []
    own = [c for c in reversed(type(thing).__mro__) if issubclass(c, Task) and c is not Task]
    of_class = {name: x for c in own for name, x in vars(c).items() if not (callable(x) or hasattr(x, "__get__"))}
    for name, value in (of_class | vars(thing)).items():
        if name.startswith("_") or name == "training" or hasattr(Task, name) or name in Task.__annotations__:
            continue
        text = getattr(value, "__qualname__", None) or repr(value)
        if not isinstance(value, Tensor | nn.Module) and " at 0x" not in text:
            words.append(f"{name}={text if len(text) <= 500 else hashlib.sha256(text.encode()).hexdigest()}")
    shapes = [f"{name}{list(p.shape)}" for name, p in getattr(thing, "_parameters", {}).items() if p is not None]
    return f"{type(thing).__qualname__}({', '.join([*words, *shapes])})"


def cases(batch: Batch) -> int:
    """How many a batch has."""
    return next(len(x) for x in batch if x is not None)


def as_sum(loss: Loss, count: int) -> tuple[Tensor, Tensor | int]:
    """A sum and what to divide it by; a mean is one of `count` cases."""
    return loss if isinstance(loss, tuple) else (loss * count, count)


def as_mean(loss: Loss) -> Tensor:
    """One number per member."""
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss
