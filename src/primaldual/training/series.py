"""Time series as a task: classification, or regression of standardised targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from ..data import Dataset, Split
from ..kernels.encoder import usable
from ..models import SeriesSizes, SeriesTransformer
from ..primal import Primal, as_primal
from .members import Members
from .model_file import Models
from .recipe import Recipe
from .series_forward import forward
from .series_recipe import series_recipe, side_by_side
from .stacked import Stacked
from .task import Batch, Loss, Metric, Task, as_mean, as_sum

EVALUATED = 1 << 17
"""Steps of all members that are evaluated at once."""


class SeriesTask(Task):
    """A set of time series, and the transformer that is trained on it. All members compute at once.

    Args:
        data: training and test series.
        mechanism: of the attention, or its name.
        sizes: of the model.
        balanced: whether classes weigh alike in the cross-entropy, however many series they have.
        class_weights: [classes], in place of that.
        impl: the executor of the attention, as in `primaldual.attention`.
    """

    left_out = ("num_batches_tracked",)

    def __init__(
        self, data: Dataset, mechanism: str | Primal = "softmax", sizes: SeriesSizes | None = None, *,
        balanced: bool = False, class_weights: Tensor | None = None, impl: str = "auto",
    ) -> None:  # fmt: skip
        self.dataset, self.sizes, self.mechanism = data, sizes or SeriesSizes(), as_primal(mechanism)
        self.config = self.sizes.config(data, self.mechanism, impl)
        self.name, self.balanced, self.class_weights = data.name, balanced, class_weights
        self.classifies = bool(data.classes)
        self.metric = Metric("accuracy", True) if self.classifies else Metric("rmse", False)
        # a target of hundreds has no decimals in bfloat16
        self.precise = ("norm", "feature_") if self.classifies else ("norm", "feature_", "head.")
        parts = {"train": data.train, "test": data.test}
        self.parts = {name: (s.x, s.padding, s.y) for name, s in parts.items() if len(s) or name == "train"}

    @classmethod
    def of(
        cls, data: Dataset, mechanism: str | Primal, recipe: Recipe, class_weights: Tensor | None = None
    ) -> SeriesTask:
        """The task that a recipe trains: its sizes, its balance."""
        if recipe.model is not None and type(recipe.model) is not SeriesSizes:
            raise ValueError(f"time series need a recipe with model=SeriesSizes(…), got {recipe.model!r}")
        return cls(data, mechanism, recipe.model, balanced=recipe.balanced, class_weights=class_weights)

    def build(self) -> SeriesTransformer:
        return SeriesTransformer(self.config)

    def loss(self, model: nn.Module, *batch: Any) -> Loss:
        x, padding, y = batch
        if self.balanced and self.classifies and self.class_weights is None:
            raise ValueError(f"{self.name}: balanced classes are weighed by all cases; give class_weights")
        return as_mean(self.loss_of(model(x, padding).unsqueeze(0), y.unsqueeze(0), self.class_weights))[0]

    def score(self, model: nn.Module, *batch: Any) -> tuple[Tensor, int]:
        x, padding, y = batch
        return self.score_of(model(x, padding).unsqueeze(0), y)[0], len(y)

    def classes(self) -> Tensor | None:
        return self.dataset.train.y if self.classifies else None

    def tensors(self, part: str, dtype: torch.dtype, device: torch.device) -> Batch:
        """Channels without any value are 0, their training mean. Fast products want rows of 16 bytes."""
        channels = self.dataset.channels
        wide = -(-channels // 8) * 8 if usable(device, dtype) else channels
        return series_tensors(getattr(self.dataset, part), dtype, device, wide)

    def members(self, weights: Stacked, train: Batch) -> Members:
        given = self.class_weights
        if self.balanced and self.classifies and given is None:
            y = train[2]
            assert y is not None
            counts = y.bincount(minlength=self.dataset.outputs).clamp(min=1)
            given = len(y) / (self.dataset.outputs * counts)
        return SeriesMembers(self, weights, None if given is None else given.to(weights.matrix))

    def loss_of(self, scores: Tensor, y: Tensor, class_weights: Tensor | None) -> Loss:
        """[members]: mean cross-entropy, or mean squared error; with weights the sum, and that of the weights."""
        if not self.classifies:
            return (scores - y).square().mean(1)
        each = cross_entropy(scores.flatten(0, 1), y.flatten(), class_weights, reduction="none").view_as(y)
        return each.mean(1) if class_weights is None else (each.sum(1), class_weights[y].sum(1))

    def score_of(self, scores: Tensor, y: Tensor) -> Tensor:
        """[members]: how many are right, or the sum of squared errors."""
        return (scores.argmax(-1) == y).sum(1) if self.classifies else (scores - y).square().sum(1)

    def finish(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Accuracy in percent, or root mean squared error in the targets' own unit."""
        return 100.0 * total / count if self.classifies else self.dataset.target_std * (total / count).sqrt()

    def deliver(self, model: nn.Module) -> nn.Module:
        """What it predicts is in the targets' own unit."""
        assert isinstance(model, SeriesTransformer)
        if not self.classifies:
            with torch.no_grad():
                model.head.weight *= self.dataset.target_std
                model.head.bias.mul_(self.dataset.target_std).add_(self.dataset.target_mean)
        return model

    def kept(self, model: nn.Module) -> Models:
        """With the preparation of the series and the names of the classes."""
        from .predictor import predictor_of

        assert isinstance(model, SeriesTransformer)
        return predictor_of(self.dataset, model).models()

    @property
    def hash(self) -> str:
        """Of the data set."""
        return self.dataset.hash

    @property
    def about(self) -> dict[str, Any]:
        """Nothing that recipe and data do not say, as a rule."""
        impl = {} if self.config.impl == "auto" else {"impl": self.config.impl}
        return impl if self.class_weights is None else impl | {"class_weights": self.class_weights.tolist()}

    def identity(self) -> dict[str, Any]:
        return {"mechanism": self.stated, "data": self.hash} | self.about

    def recipe_in_key(self, recipe: Recipe) -> dict[str, Any]:
        return side_by_side(recipe)

    def data(self) -> dict[str, Any]:
        data = self.dataset
        return {
            "name": data.name, "hash": data.hash, "train": len(data.train), "test": len(data.test),
            "length": data.length, "channels": data.channels, "classes": len(data.classes),
        }  # fmt: skip


def series_task(data: Dataset, mechanism: str | Primal | None, recipe: Recipe | None) -> tuple[SeriesTask, Recipe]:
    """The task of a set, and a whole recipe."""
    recipe = recipe or series_recipe(data.kind)
    recipe = replace(recipe, model=SeriesSizes()) if recipe.model is None else recipe
    return SeriesTask.of(data, mechanism or "softmax", recipe), recipe


class SeriesMembers(Members):
    """All at once. A batch is series, their padding or None, and targets."""

    def __init__(self, task: SeriesTask, weights: Stacked, class_weights: Tensor | None) -> None:
        super().__init__(task, weights)
        self.series, self.class_weights = task, class_weights

    def losses(self, batch: Batch) -> Loss:
        """Of every member, [members]."""
        x, padding, y = batch
        assert x is not None and y is not None
        scores = forward(self.series.config, self.weights, x, padding, True).to(self.weights.matrix.dtype)
        return self.series.loss_of(scores, y, self.class_weights)

    def learn(self, batch: Batch) -> Tensor:
        losses = as_mean(self.losses(batch))
        self.weights.gather(losses.sum())
        return losses.detach()

    def learn_part(self, batch: Batch, add: bool) -> tuple[Tensor, Tensor | int]:
        assert batch[0] is not None
        sums, count = as_sum(self.losses(batch), batch[0].shape[1])
        self.weights.gather(sums.sum(), add)
        return sums.detach(), count

    def score(self, batch: Batch) -> tuple[Tensor, int]:
        x, padding, y = batch
        assert x is not None and y is not None
        members = self.weights.members
        padding = None if padding is None else padding.expand(members, -1, -1)
        scores = forward(self.series.config, self.weights, x.expand(members, -1, -1, -1), padding, False)
        return self.series.score_of(scores, y), len(y)

    def at_once(self, part: Batch) -> int:
        assert part[0] is not None
        return max(1, EVALUATED // (self.weights.members * part[0].shape[1]))


def series_tensors(split: Split, dtype: torch.dtype, device: torch.device, channels: int = 0) -> Batch:
    """Series [cases, length, channels], their padding or None, and targets; channels without any value are 0.

    Args:
        channels: so many at least; those that a series does not have are 0.
    """
    x, y = split.x.nan_to_num(nan=0.0).to(dtype), split.y
    if channels > x.shape[-1]:
        x = pad(x, (0, channels - x.shape[-1]))
    if y.is_floating_point():
        y = y.to(torch.promote_types(dtype, torch.float32))
    padding = split.padding
    return x.to(device), None if padding is None else padding.to(device), y.to(device)
