"""The primal layer: y = f(x) = W Φ(T(x)) / h(T(x)) + b, and the data each head is fitted to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from ._spec import Spec, added, check_flag
from .features import Exponential, FeatureMap, Parameters
from .inputs import InputMap, PointMap, PositionMap, TokenMap
from .normalizers import Gated, KernelSum, Normalizer
from .per_token import PerToken
from .training_sets import AllKeys, TrainingSet
from .weights import PointWeights


@dataclass(frozen=True)
class Primal(Spec):
    """A primal layer, stated. `Primal()` is the one whose dual is softmax attention.

    Args:
        features: Φ.
        normalizer: h.
        inputs: T, applied left to right; maps of the token sequence come before maps of single points.
        training_set: S.
        bias: whether b is kept (the layer learns it, one vector per head); the paper sets b = 0.
        residual: whether f(x) = … + x, x the layer's query input.
        weights: w, what the points of S weigh; all the same without.

    >>> from primaldual.primal import Recenter
    >>> Primal(inputs=(Recenter(0.5),)) == Primal.from_dict(Primal(inputs=(Recenter(0.5),)).to_dict())
    True
    """

    features: FeatureMap = field(default_factory=Exponential)
    normalizer: Normalizer = field(default_factory=KernelSum)
    inputs: tuple[InputMap, ...] = ()
    training_set: TrainingSet = field(default_factory=AllKeys)
    bias: bool = False
    residual: bool = False
    weights: PointWeights | None = added(None)
    _ungated: ClassVar[Primal | None]

    def __post_init__(self) -> None:
        if isinstance(self.inputs, list):
            object.__setattr__(self, "inputs", tuple(self.inputs))
        if not isinstance(self.inputs, tuple):
            raise TypeError(
                f"Primal: inputs must be a tuple of input maps, such as (Recenter(1.0),); got {self.inputs!r}"
            )
        for name, kind in (("features", FeatureMap), ("normalizer", Normalizer), ("training_set", TrainingSet)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"Primal: {name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        check_flag("Primal", "bias", self.bias)
        check_flag("Primal", "residual", self.residual)
        if not isinstance(self.weights, PointWeights | None):
            raise TypeError(f"Primal: weights must be PointWeights such as Forget(), or None; got {self.weights!r}")
        of = self.normalizer.over if isinstance(self.normalizer, Gated) else self.normalizer
        if self.weights is not None and of != KernelSum():
            raise ValueError(
                f"Primal: {self.weights!r} is defined up to a factor for each query, which cancels under KernelSum() "
                f"alone (or with a gate on it), not under {self.normalizer!r}"
            )
        for map_ in self.inputs:
            if not isinstance(map_, TokenMap | PointMap):
                raise TypeError(f"Primal: every input map must be a TokenMap or a PointMap, got {map_!r}")
        stages = [isinstance(map_, PointMap) for map_ in self.inputs]
        if stages != sorted(stages):
            raise ValueError(
                f"Primal: maps of the token sequence act before pooling, maps of single points after it, so in "
                f"inputs={self.inputs!r} the former must come first"
            )
        gated = isinstance(self.normalizer, Gated)  # asked for in every call
        object.__setattr__(self, "_ungated", replace(self, normalizer=of) if gated else None)
        names = [name for map_ in self.inputs for name in map_.learned(1, 1)]
        if len(names) != len(set(names)):
            raise ValueError(
                f"Primal: two input maps learn a tensor of the same name, {sorted(names)}; combine them into one"
            )

    @property
    def token_maps(self) -> tuple[TokenMap, ...]:
        """The maps that act before pooling."""
        return tuple(m for m in self.inputs if isinstance(m, TokenMap))

    @property
    def mixing_maps(self) -> tuple[TokenMap, ...]:
        """Those of them that mix tokens, so that what is hidden in one may show in another."""
        return tuple(m for m in self.token_maps if not isinstance(m, PositionMap))

    @property
    def point_maps(self) -> tuple[PointMap, ...]:
        """The maps that act after pooling."""
        return tuple(m for m in self.inputs if isinstance(m, PointMap))

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """What a layer with so many heads learns beyond its projections: initial values by name."""
        learned = self.training_set.learned(heads, head_dim) | self.normalizer.learned(heads, head_dim)
        for map_ in self.inputs:
            learned |= map_.learned(heads, head_dim)
        return learned

    def made(self, heads: int, value_dim: int) -> dict[str, PerToken]:
        """What a layer makes of its input for every token, by name."""
        weights = {} if self.weights is None else self.weights.made(heads, value_dim)
        return self.normalizer.made(heads, value_dim) | weights

    @property
    def ungated(self) -> Primal:
        """The same without a gate on its normalizer."""
        return self if self._ungated is None else self._ungated

    @property
    def by_head(self) -> frozenset[str]:
        """Names of the tensors whose first dimension is the head, and not that of some heads alone."""
        of_maps = (name for map_ in self.inputs for name in map_.by_head)
        return frozenset((*self.features.by_head, *self.normalizer.by_head, *of_maps))

    def on_tokens(self, x: Tensor, positions: Tensor, parameters: Parameters) -> Tensor:
        """Tokens [batch, heads, length, dim] at these places, [length] or [batch, length], through the token maps."""
        for map_ in self.token_maps:
            x = map_.at(x, positions, parameters)
        return x

    def causal_refusal(self, heads: int) -> str | None:
        """Why this primal has no causal form with so many heads; None when it has one."""
        for map_ in self.token_maps:
            if reason := map_.causal_refusal():
                return reason
        for scale in self.training_set.head_scales(heads):
            if reason := self.training_set.causal_refusal(scale):
                return reason
        centred = [m for m in self.point_maps if m.needs != "nothing"]
        if centred and self.features.finite:
            return (
                f"{centred[0]!r} with the finite features {self.features!r}: the statistics change with every query "
                f"and nothing cancels, so the sum does not re-associate"
            )
        return None
