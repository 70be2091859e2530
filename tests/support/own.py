"""Parts of a user's own: every Φ, h, T, S and pattern that README says may be a small subclass, and of the library's.

Each computes something that no class of the library does, so whoever takes it for one of these is seen to be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from primaldual import Primal
from primaldual.primal import (
    AllKeys,
    BatchNorm,
    DepthwiseConv1d,
    EluPlusOne,
    Exponential,
    FeatureMap,
    KernelSum,
    Laplace,
    Moments,
    Normalizer,
    Pattern,
    PointMap,
    Points,
    Pooled,
    RandomFeatures,
    Recenter,
    Rotary,
    Scale,
    Sparse,
    Strided,
    TokenMap,
    TrainingSet,
    Unit,
)
from primaldual.primal import Gaussian as LibraryGaussian
from primaldual.primal.patterns import Band


@dataclass(frozen=True)
class ShiftedSquare(FeatureMap):
    def features(self, x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x[..., :1]), x.square()], -1)

    def dim(self, head_dim: int) -> int:
        return head_dim + 1


@dataclass(frozen=True)
class Projected(FeatureMap):
    """It has a state, in torch's default dtype."""

    fixed: ClassVar = ("directions",)

    def state(self, head_dim: int) -> dict[str, Tensor]:
        return {"directions": torch.linspace(-1, 1, 6 * head_dim).unflatten(0, (head_dim, 6))}

    def map(self, x: Tensor, parameters) -> Tensor:
        return (x @ parameters["directions"]).exp()

    def dim(self, head_dim: int) -> int:
        return 6


@dataclass(frozen=True)
class Gaussian(FeatureMap):
    """A kernel without features that can be written down."""

    finite: ClassVar[bool] = False

    def kernel(self, x: Tensor, y: Tensor, parameters=None) -> Tensor:
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1).mul(-0.5).exp()


class Cooler(Exponential):
    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * super().log_kernel(x, y)


class Squared(Exponential):
    """Only the kernel is another."""

    def kernel(self, x: Tensor, y: Tensor, parameters=None) -> Tensor:
        return 1 + super().kernel(x, y).square()


class EluPlusTwo(EluPlusOne):
    def features(self, x: Tensor) -> Tensor:
        return 1 + super().features(x)


class EluKernelSquared(EluPlusOne):
    """Only the kernel is another; what `features` gives is not its Φ."""

    def kernel(self, x: Tensor, y: Tensor, parameters=None) -> Tensor:
        return super().kernel(x, y, parameters).square()


class FewerRandom(RandomFeatures):
    def map(self, x: Tensor, parameters) -> Tensor:
        return super().map(x, parameters)[..., :-2]


@dataclass(frozen=True)
class RootOfSum(Normalizer):
    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        return kernel_sum.sqrt()


class SumAndOne(KernelSum):
    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        return kernel_sum + 1


class Two(Unit):
    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        return 2 * super().h(x, kernel_sum)


@dataclass(frozen=True)
class Spread(PointMap):
    """Not affine."""

    needs: ClassVar = "mean"

    def apply(self, x: Tensor, moments, parameters) -> Tensor:
        return (x / (1 + (x - moments.mean).square())).to(x.dtype)


@dataclass(frozen=True)
class Stretch(PointMap):
    needs: ClassVar = "mean"

    def affine(self, moments, parameters):
        return 2 * moments.mean, torch.full_like(moments.mean, 1.5)


@dataclass(frozen=True)
class PerHeadTilt(PointMap):
    """It takes channels as the last dimension and heads as dimension 1, and learns."""

    needs: ClassVar = "variance"
    by_head: ClassVar = ("tilt",)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"tilt": torch.linspace(0.5, 1.5, heads)}

    def apply(self, x: Tensor, moments, parameters) -> Tensor:
        for found in moments:  # what the base class promises
            assert found.dim() == x.dim() and found.shape[-1] == x.shape[-1] and found.shape[-2] in (1, x.shape[-2])
            torch.broadcast_shapes(found.shape, x.shape)
        tilt = parameters["tilt"].reshape(-1, *(1,) * (x.dim() - 2))
        spread = (moments.variance[..., :1] + 1).sqrt()
        return ((x + tilt * (x[..., :1] - moments.mean[..., :1]).tanh()) / spread).to(x.dtype)


@dataclass(frozen=True)
class LearnedPairs(TrainingSet):
    """Neighbours in pairs, by a weight that is learned."""

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"weight": torch.tensor([0.25, 0.75])}

    def reduce(self, keys, values, seen, scale, parameters) -> Points:
        points = -(-keys.shape[-2] // 2)
        token = torch.arange(keys.shape[-2])
        share = parameters["weight"][token % 2] * (token // 2 == torch.arange(points)[:, None])  # [W, S]
        exists = (seen.unsqueeze(-2) & (share > 0)).any(-1)
        return Points((share @ keys).unsqueeze(2), (share @ values).unsqueeze(2), exists, share[None, None, None])

    def points(self, scale: int, tokens: int) -> int:
        return -(-tokens // 2)


class TwiceRecentred(Recenter):
    def affine(self, moments, parameters):
        shift, scale = super().affine(moments, parameters)
        return 2 * shift, scale


class RecentredAndBent(Recenter):
    """Its `affine` is that of `Recenter`, and not what it does."""

    def apply(self, x: Tensor, moments, parameters) -> Tensor:
        return super().apply(x, moments, parameters).tanh()


class HalfScaled(BatchNorm):
    def affine(self, moments, parameters):
        shift, scale = super().affine(moments, parameters)
        return shift, scale.sqrt()


@dataclass(frozen=True)
class AddPrevious(TokenMap):
    def causal_refusal(self) -> str | None:
        return None

    def tokens(self, x: Tensor, parameters) -> Tensor:
        return x + 0.5 * torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :]], dim=-2)


class ConvTwice(DepthwiseConv1d):
    def tokens(self, x: Tensor, parameters) -> Tensor:
        return 2 * super().tokens(x, parameters)


class _Anywhere:
    """A causal form: hidden tokens are hidden points, as in `TrainingSet.reduce`."""

    def causal_refusal(self, scale: int) -> str | None:
        return None


def _every_third(keys: Tensor, values: Tensor, seen: Tensor) -> Points:
    kept = slice(None, None, 3)
    share = torch.eye(keys.shape[-2], dtype=keys.dtype)[kept].expand(*seen[..., kept].shape, -1)
    return Points(keys[:, :, None, kept], values[:, :, None, kept], seen[..., kept], share)


@dataclass(frozen=True)
class EveryThird(_Anywhere, TrainingSet):
    def reduce(self, keys, values, seen, scale, parameters) -> Points:
        return _every_third(keys, values, seen)

    def points(self, scale: int, tokens: int) -> int:
        return -(-tokens // 3)


@dataclass(frozen=True)
class Doubled(_Anywhere, TrainingSet):
    """As many points as tokens, and other ones."""

    def reduce(self, keys, values, seen, scale, parameters) -> Points:
        return super().reduce(2 * keys, -values, seen, scale, parameters)


class DoubledKeys(_Anywhere, AllKeys):
    def reduce(self, keys, values, seen, scale, parameters) -> Points:
        return super().reduce(2 * keys, -values, seen, scale, parameters)


@dataclass(frozen=True)
class EvenDistances(TrainingSet):
    def visible(self, scale: int, queries: int, tokens: int, device) -> Tensor:
        return (torch.arange(queries, device=device)[:, None] - torch.arange(tokens, device=device)) % 2 == 0


class OddKeys(AllKeys):
    def visible(self, scale: int, queries: int, tokens: int, device) -> Tensor:
        return (torch.arange(tokens, device=device) % 2 == 0).expand(queries, tokens)


@dataclass(frozen=True)
class FirstHeadsSeeHalf(TrainingSet):
    """Scales that are no windows."""

    def head_scales(self, heads: int) -> tuple[int, ...]:
        return (2, *(1,) * (heads - 1))

    def visible(self, scale: int, queries: int, tokens: int, device) -> Tensor | None:
        return None if scale == 1 else (torch.arange(tokens, device=device) % 2 == 0).expand(queries, tokens)


class PooledSums(Pooled):
    """Points at scale 1 are other than tokens, too."""

    def reduce(self, keys, values, seen, scale, parameters) -> Points:
        points = super().reduce(keys, values, seen, scale, parameters)
        return points._replace(keys=2 * points.keys, values=-points.values)


class NotItself(Sparse):
    def visible(self, scale: int, queries: int, tokens: int, device) -> Tensor:
        kept = super().visible(scale, queries, tokens, device)
        return kept & (torch.arange(queries, device=device)[:, None] != torch.arange(kept.shape[1], device=device))


@dataclass(frozen=True)
class SameParity(Pattern):
    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return i % 2 == j % 2


@dataclass(frozen=True)
class Near(Pattern):
    """It says where its keys lie."""

    def pieces(self, length: int):
        return (Band(2),)

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return (i - j).abs() <= 2


class StridedByThree(Strided):
    """It inherits `pieces`, which are not its own."""

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return (i - j) % 3 == 0


@dataclass(frozen=True)
class Growing(Rotary):
    """It inherits no rotation: tokens grow with their place."""

    def at(self, x: Tensor, positions: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        places = positions[:, None] if positions.dim() == 1 else positions[:, None, :, None]
        return x * (1 + 0.1 * places).to(x.dtype)


@dataclass(frozen=True)
class Warmer(Scale):
    """Its factor is not `start`."""

    def factor(self, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return x.new_tensor(1.5)


@dataclass(frozen=True)
class Unscaled(Scale):
    """It inherits a factor that it has no use for."""

    def apply(self, x: Tensor, moments: Moments, parameters: dict[str, Tensor]) -> Tensor:
        return x.tanh()


@dataclass(frozen=True)
class Steeper(Laplace):
    """Its slopes are not `slopes`."""

    def log_positions(self, queries: Tensor, points: Tensor, parameters: dict[str, Tensor]) -> Tensor | None:
        found = super().log_positions(queries, points, parameters)
        return None if found is None else 2 * found


@dataclass(frozen=True)
class Opposite(LibraryGaussian):
    """It inherits a bias on keys that is not its own."""

    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return -(x @ y.transpose(-1, -2)).abs() / 3


@dataclass(frozen=True)
class FixedSink(KernelSum):
    """It inherits a sink that is not its own."""

    def log_sink(self, like: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return like.new_full((1, 1, 1), 1.5)


OWN: dict[str, Primal] = {
    "Φ": Primal(features=ShiftedSquare()),
    "Φ with a state": Primal(features=Projected()),
    "Φ of a kernel": Primal(features=Gaussian()),
    "Φ from Exponential": Primal(features=Cooler(), inputs=(Recenter(),)),
    "Φ from Exponential, its kernel": Primal(features=Squared()),
    "Φ from EluPlusOne": Primal(features=EluPlusTwo()),
    "Φ from EluPlusOne, its kernel": Primal(features=EluKernelSquared()),
    "Φ from RandomFeatures": Primal(features=FewerRandom(8)),
    "h": Primal(normalizer=RootOfSum()),
    "h of finite Φ": Primal(EluPlusOne(), RootOfSum()),
    "h from KernelSum": Primal(normalizer=SumAndOne(), inputs=(Recenter(),)),
    "h from KernelSum of finite Φ": Primal(EluPlusOne(), SumAndOne()),
    "h from Unit": Primal(normalizer=Two()),
    "T": Primal(inputs=(Spread(),)),
    "T of finite Φ": Primal(EluPlusOne(), inputs=(Spread(),)),
    "T affine": Primal(inputs=(Stretch(),)),
    "T affine, pooled": Primal(inputs=(Stretch(),), training_set=Pooled()),
    "T that learns": Primal(inputs=(PerHeadTilt(),)),
    "T that learns, pooled": Primal(inputs=(PerHeadTilt(),), training_set=Pooled((1, 2, 1, 3, 2, 8))),
    "T that learns, then Recenter": Primal(inputs=(PerHeadTilt(), Recenter())),
    "T that learns, of finite Φ": Primal(EluPlusOne(), inputs=(PerHeadTilt(),)),
    "T from Recenter": Primal(inputs=(TwiceRecentred(0.75),)),
    "T from Recenter, learned": Primal(inputs=(TwiceRecentred(learnable=True),), training_set=Pooled()),
    "T from Recenter, its apply": Primal(inputs=(RecentredAndBent(),)),
    "T from Recenter, its apply, of finite Φ": Primal(EluPlusOne(), inputs=(RecentredAndBent(),)),
    "T from BatchNorm": Primal(inputs=(HalfScaled(),)),
    "T of tokens": Primal(inputs=(AddPrevious(), Recenter())),
    "T from DepthwiseConv1d": Primal(inputs=(ConvTwice(3, causal=True),)),
    "T from Rotary": Primal(inputs=(Growing(), Recenter())),
    "T from Scale": Primal(inputs=(Warmer(0.5),), training_set=Pooled()),
    "T from Scale, its apply": Primal(inputs=(Unscaled(2.0),)),
    "Φ from Laplace": Primal(features=Steeper()),
    "Φ from Gaussian": Primal(features=Opposite()),
    "h from KernelSum, its sink": Primal(normalizer=FixedSink(sink=1)),
    "h from KernelSum, its sink, of finite Φ": Primal(EluPlusOne(), FixedSink(sink=1)),
    "S": Primal(training_set=EveryThird()),
    "S of as many points": Primal(training_set=Doubled()),
    "S of finite Φ": Primal(EluPlusOne(), training_set=Doubled()),
    "S with T": Primal(inputs=(Recenter(),), training_set=Doubled()),
    "S that learns": Primal(training_set=LearnedPairs()),
    "S from AllKeys": Primal(inputs=(Recenter(),), training_set=DoubledKeys()),
    "S from Pooled": Primal(training_set=PooledSums()),
    "S from Pooled under a pattern": Primal(training_set=Sparse(Strided(2), PooledSums())),
    "S from Sparse": Primal(training_set=NotItself(Strided(3))),
    "S visible": Primal(training_set=EvenDistances()),
    "S visible with T": Primal(inputs=(Recenter(),), training_set=EvenDistances()),
    "S visible of finite Φ": Primal(EluPlusOne(), training_set=EvenDistances()),
    "S visible, from AllKeys": Primal(training_set=OddKeys()),
    "S with scales": Primal(training_set=FirstHeadsSeeHalf()),
    "pattern": Primal(training_set=Sparse(SameParity())),
    "pattern with pieces": Primal(inputs=(Recenter(),), training_set=Sparse(Near(), Pooled())),
    "pattern from Strided": Primal(training_set=Sparse(StridedByThree(4))),
}
