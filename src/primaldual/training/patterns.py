"""Time series as a task of the `PatternTransformer`: augmented, with soft labels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ..data import Dataset
from ..models import PatternSizes, PatternTransformer
from ..models.dropout import draw_from
from ..primal import Primal, as_primal
from .augmentation import Augmentation
from .members import InTurn, Members
from .model_file import Models
from .series import series_tensors
from .stacked import Stacked
from .task import Batch, Loss, Metric, Task


class PatternTask(Task):
    """A set of time series, and the transformer that is trained on it.

    Args:
        data: training and test series; targets of a regression are standardised.
        mechanism: of the attention, or its name.
        sizes: of the model.
        augmentation: of the series that are trained on.
        smoothing: share of a label that goes to all classes alike.
        weights: of the training series in the loss, with a mean of 1; all alike unless given.
    """

    precise = ("norm", "feature_")

    def __init__(
        self, data: Dataset, mechanism: str | Primal = "softmax", sizes: PatternSizes | None = None,
        augmentation: Augmentation | None = None, smoothing: float = 0.0, weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.dataset, self.sizes, self.mechanism = data, sizes or PatternSizes(), as_primal(mechanism)
        self.config = self.sizes.config(data, self.mechanism)
        self.name, self.augmentation, self.smoothing = data.name, augmentation, smoothing
        self.classifies = bool(data.classes)
        self.metric = Metric("accuracy", True) if self.classifies else Metric("rmse", False)
        parts = {"train": data.train, "test": data.test}
        self.parts = {name: (s.x, s.padding, s.y) for name, s in parts.items() if len(s) or name == "train"}
        self.weights = weights
        if weights is not None:
            self.parts["train"] = (*self.parts["train"], weights)

    def build(self) -> PatternTransformer:
        return PatternTransformer(self.config)

    def loss(self, model: nn.Module, *batch: Any) -> Loss:
        x, padding, y, *given = batch
        targets = y.unsqueeze(1).to(x)
        if self.classifies:
            targets = one_hot(y, self.config.outputs).to(x)
            targets = (1 - self.smoothing) * targets + self.smoothing / self.config.outputs
        weights = given[0].unsqueeze(1).to(x) if given else torch.ones_like(targets[:, :1])
        if model.training and self.augmentation is not None:  # of mixed series weights are mixed as targets are
            both = torch.cat([weights * targets, weights], 1)
            x, padding, both = self.augmentation(x, padding, both, getattr(model, "generator", None))
            weights = both[:, -1:]
            targets = both[:, :-1] / weights
        outputs = model(x, padding)
        if not self.classifies:
            outputs = outputs.unsqueeze(1)
            return (weights * (outputs - targets).square()).mean()
        return -(weights * targets * outputs.log_softmax(1)).sum(1).mean()

    def score(self, model: nn.Module, *batch: Any) -> tuple[Tensor, int]:
        x, padding, y = batch
        found = model(x, padding)
        return ((found.argmax(1) == y) if self.classifies else (found - y).square()).sum(), len(y)

    def finish(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Accuracy in percent, or root mean squared error in the targets' own unit."""
        return 100.0 * total / count if self.classifies else self.dataset.target_std * (total / count).sqrt()

    def classes(self) -> Tensor | None:
        return self.dataset.train.y if self.classifies else None

    def tensors(self, part: str, dtype: torch.dtype, device: torch.device) -> Batch:
        """Channels without any value are 0, their training mean."""
        tensors = series_tensors(getattr(self.dataset, part), dtype, device)
        return tensors if self.weights is None or part != "train" else (*tensors, self.weights.to(device, dtype))

    def members(self, weights: Stacked, train: Batch) -> Members:
        return _Drawing(self, weights)

    def kept(self, model: nn.Module) -> Models:
        """With the preparation of the series, the names of the classes and the unit of the targets."""
        from .predictor import predictor_of

        return predictor_of(self.dataset, model, (self.dataset.target_std, self.dataset.target_mean)).models()

    @property
    def hash(self) -> str:
        """Of the data set, and of the weights of its series."""
        return self.dataset.hash if self.weights is None else super().hash


class _Drawing(InTurn):
    """Members whose model draws from their own generator, so that threads train side by side on a CPU."""

    def __init__(self, task: PatternTask, weights: Stacked) -> None:
        super().__init__(task, weights)
        on_cpu = weights.generator.device.type == "cpu"
        # attention draws its own dropout as it likes
        self._own = on_cpu and not (task.config.layers and task.config.drops_attention)
        if self._own:
            model: Any = self._inside.model
            model.generator = weights.generator
            draw_from(model, weights.generator)

    def _randomness(self) -> AbstractContextManager[None]:
        return nullcontext() if self._own else super()._randomness()
