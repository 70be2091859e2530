"""Which form a primal has: the one place that says what a kernel, a route or a rewrite may take it for.

By exact type, and what is not known is "own": a subclass of `Recenter` may compute anything, so it is never taken for a
re-centring. A part of one's own then goes where its own methods are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..primal import (
    AllKeys,
    EluPlusOne,
    Exponential,
    Gaussian,
    KernelSum,
    Laplace,
    Normalizer,
    Pattern,
    PointMap,
    Polynomial,
    Pooled,
    Primal,
    RandomFeatures,
    Recenter,
    Scale,
    Sparse,
    TrainingSet,
)
from ..primal.features import FeatureMap, LogKernel
from ..primal.patterns import Piece


class Form(NamedTuple):
    """What is known of a primal."""

    softmax: bool
    """κ is the exponential of q·k/√D and h its sum, so that a factor per query cancels."""
    distance: bool
    """κ is the exponential of q·k/√D times `Laplace`'s kernel of positions."""
    cancels: bool
    """κ is either of these and h its sum, so that a factor per query cancels."""
    log_kernel: bool
    """κ is exp(`log_kernel`), of the library or of one's own, so that it can be shifted before it overflows."""
    kernel_sum: bool
    """h is Σ κ."""
    sink: bool
    """h is Σ κ and a constant."""
    finite: bool
    """κ(x, y) = Φ(x)·Φ(y) with a Φ that can be written down, so that the sum may re-associate."""
    token_maps: bool
    """Some input maps act on the sequence, before pooling."""
    maps: Literal["none", "recentring", "other"]
    """The input maps of points: none, exactly one `Recenter`, or anything else."""
    points: Literal["tokens", "windows", "pooled", "own"]
    """Tokens; their means over plain windows (no grid, no prefix); any other `Pooled`; or a `reduce` of one's own."""
    subset: Literal["all", "pattern", "own"]
    """What a query sees of the points: all, those of `Sparse`, or a `visible` of one's own."""

    weighted: bool
    """Points have weights."""

    @property
    def simple(self) -> bool:
        """Softmax with at most a re-centring, over tokens or plain windows, whose points all weigh the same."""
        return self.softmax and self.maps != "other" and self.points in ("tokens", "windows") and not self.weighted


def form_of(primal: Primal) -> Form:
    """The form of a primal.

    >>> from primaldual import mechanism
    >>> form_of(mechanism("bn+sh")).simple
    True
    """
    if torch.compiler.is_compiling():  # which does not trace through a cache
        return _form.__wrapped__(primal)
    return _form(primal)


@lru_cache(maxsize=1024)
def _form(primal: Primal) -> Form:
    primal = primal.ungated  # a gate multiplies the output, whatever that is the sum of
    maps = primal.point_maps
    training_set = primal.training_set
    over = over_of(training_set)
    points: Literal["tokens", "windows", "pooled", "own"] = "own"
    if type(over) is Pooled:
        points = "windows" if over.how == "mean" and over.grid is None and not over.prefix else "pooled"
    elif type(over) is AllKeys or _inherits(over, TrainingSet, "reduce", "head_scales", "points", "coordinate"):
        points = "tokens"
    subset: Literal["all", "pattern", "own"] = "own"
    if pattern_of(training_set) is not None:
        subset = "pattern"
    elif _inherits(training_set, TrainingSet, "visible"):
        subset = "all"
    distance, sums = type(primal.features) is Laplace, primal.normalizer == KernelSum()
    exponential = kernel_of(primal.features) == "exponential"
    return Form(
        softmax=exponential and sums,
        distance=distance,
        cancels=(exponential or distance) and sums,
        log_kernel=isinstance(primal.features, LogKernel) and _inherits(primal.features, LogKernel, "kernel"),
        kernel_sum=is_kernel_sum(primal.normalizer),
        sink=has_sink(primal.normalizer),
        finite=primal.features.finite
        and (_inherits(primal.features, FeatureMap, "kernel") or kernel_of(primal.features) == "polynomial")
        and _inherits(primal.features, FeatureMap, "log_positions"),
        token_maps=bool(primal.token_maps),
        maps="none" if not maps else "recentring" if len(maps) == 1 and type(maps[0]) is Recenter else "other",
        points=points,
        subset=subset,
        weighted=primal.weights is not None,
    )


Kernel = Literal["exponential", "gaussian", "polynomial", "elu + 1", "random features", "other"]
"""κ, where something is made for it; any other may be anything."""

_KERNELS: dict[type[FeatureMap], Kernel] = {
    Exponential: "exponential",
    Gaussian: "gaussian",
    Polynomial: "polynomial",
    EluPlusOne: "elu + 1",
    RandomFeatures: "random features",
}


def kernel_of(features: FeatureMap) -> Kernel:
    """Which κ these features have."""
    return _KERNELS.get(type(features), "other")


def knows_positions(features: FeatureMap) -> bool:
    """Whether κ is a kernel of (position, point)."""
    return not _inherits(features, FeatureMap, "log_positions")


def is_kernel_sum(normalizer: Normalizer) -> bool:
    """Whether h is Σ κ."""
    return _adds_up(normalizer) and normalizer.sink == 0


def has_sink(normalizer: Normalizer) -> TypeGuard[KernelSum]:
    """Whether h is Σ κ and a constant."""
    return _adds_up(normalizer) and normalizer.sink != 0


def _adds_up(normalizer: Normalizer) -> TypeGuard[KernelSum]:
    return isinstance(normalizer, KernelSum) and _inherits(normalizer, KernelSum, "h", "at", "log_sink")


def over_of(training_set: TrainingSet) -> TrainingSet:
    """The points that a pattern picks from; of any other training set, that itself."""
    return training_set.over if type(training_set) is Sparse else training_set


def pooling_of(training_set: TrainingSet) -> Pooled | None:
    """The pooling inside a training set, if any."""
    inner = over_of(training_set)
    return inner if type(inner) is Pooled else None


def pattern_of(training_set: TrainingSet) -> Pattern | None:
    """What a query sees of the points, where the training set is `Sparse` and nothing else."""
    return training_set.pattern if type(training_set) is Sparse else None


def pieces_of(pattern: Pattern, length: int) -> tuple[Piece, ...] | None:
    """Where the keys that a pattern keeps lie; None where it does not say, or where `allows` is newer than `pieces`."""
    order = type(pattern).__mro__
    says, keeps = (next(i for i, c in enumerate(order) if name in c.__dict__) for name in ("pieces", "allows"))
    return pattern.pieces(length) if says <= keeps else None


def is_affine(map_: PointMap) -> bool:
    """Whether the map is x ↦ (x − shift) ⊙ scale, and nothing else."""
    return type(map_) is Scale or (_inherits(map_, PointMap, "apply") and not _inherits(map_, PointMap, "affine"))


class Beta(NamedTuple):
    """β of a re-centring: the factor, times what is learned for each head, where it is."""

    factor: float
    per_head: Tensor | None  # [heads]


def beta_of(map_: PointMap, parameters: Mapping[str, Tensor]) -> Beta:
    """β of a `Recenter`; one that is to be learned and is not given has its initial value."""
    assert type(map_) is Recenter
    learned = parameters.get("beta") if map_.learnable else None
    return Beta(float(map_.beta), None) if learned is None else Beta(1.0, learned)


def _inherits(part: object, base: type, *names: str) -> bool:
    """Whether these methods are those of the base class."""
    return all(getattr(type(part), name) is getattr(base, name) for name in names)
