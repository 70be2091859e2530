"""The paper's mechanisms by name; each is a value of `Primal`."""

from __future__ import annotations

from typing import Any

from ..base.suggestions import did_you_mean
from ._primal import Primal
from .convolutions import DepthwiseConv1d, DepthwiseConv2d
from .features import EluPlusOne, Exponential, FeatureMap
from .gaussian import Gaussian
from .inputs import BatchNorm, InputMap, PointMap, Recenter, RmsNorm, TokenMap
from .laplace import Laplace
from .normalizers import Gated, KernelSum, Normalizer
from .patterns import Fixed, Pattern, Strided, Window
from .polynomial import Polynomial
from .pooled import Pooled
from .rotary import Rotary
from .scale import Scale
from .sparse import Sparse
from .training_sets import AllKeys, TrainingSet
from .weights import Forget

_ABOUT = {
    "softmax": "softmax attention",
    "bn": "Attention-BN",
    "sh": "Attention-SH",
    "bn+sh": "Attention-BN+SH",
    "conv1d": "Attention-Conv1D",
    "conv2d": "Attention-Conv2D",
    "linear": "linear attention",
    "linear-bn": "Linear Attention-BN",
    "linear-sh": "Linear Attention-SH",
    "linear-bn+sh": "Linear Attention-BN+SH",
    "sparse": "sparse attention",
    "sparse-bn": "Sparse Attention-BN",
    "sparse-sh": "Sparse Attention-SH",
    "sparse-bn+sh": "Sparse Attention-BN+SH",
    "qk-norm": "QK-norm, BN's rival",
    "alibi": "ALiBi",
    "alibi+sh": "Attention-SH, ALiBi",
    "sink": "softmax with a sink",
    "gate": "softmax, gated",
    "gate+sh": "Attention-SH, gated",
    "forget": "Forgetting Transformer",
    "forget+sh": "Attention-SH, decaying",
    "gaussian": "Gaussian kernel",
    "polynomial": "polynomial kernel",
}
_PATTERNS: dict[str, Pattern] = {"strided": Strided(), "fixed": Fixed(), "window": Window()}
_OPTIONS = {
    "bn": ("beta", "learnable", "full", "eps"),
    "sh": ("scales", "how", "prefix", "grid"),
    "conv1d": ("size", "causal", "channels"),
    "conv2d": ("size", "grid", "prefix"),
    "linear": ("features",),
    "sparse": ("pattern", "stride"),
    "qk-norm": ("eps", "temperature"),
    "alibi": ("slopes",),
    "sink": ("sink",),
    "gate": ("per",),
    "gaussian": ("bandwidth",),
    "polynomial": ("degree", "constant"),
}
"""Of each part of a name."""
_ANY = ("rotary",)
"""Of every name."""


def mechanisms() -> tuple[str, ...]:
    """Every name that `mechanism` takes."""
    return tuple(_ABOUT)


def about(name: str) -> str:
    """What the paper calls a named mechanism."""
    return _ABOUT[name]


def mechanism(name: str, **options: Any) -> Primal:
    """A mechanism of the paper as the primal layer it is the dual of.

    Args:
        name: one of `mechanisms()`.
        beta, learnable, full, eps: with `bn`: β (1), learned per head (False), the full batch norm (False), its ε
            (1e-5). `eps` also goes with `qk-norm` (1e-6).
        temperature: with `qk-norm`: a learned `Scale` of the scores, one per head (False).
        scales, how, prefix, grid: with `sh`: as in `Pooled`.
        size, causal, grid, prefix: with `conv1d`, `conv2d`: kernel size (5, or (2, 2)), causal form (1-D), patch grid,
            tokens before the patches, such as 1 for a class token.
        channels: with `conv1d`: "one" kernel for all channels, or "each" its own.
        pattern, stride: with `sparse`: a `Pattern`, or "strided", "fixed" or "window" (of 32 keys); the stride (32) of
            the strided one, or "sqrt" for round(√N), N the padded, pooled length, as the paper's tables here were run.
        features: with `linear`: another finite Φ.
        sink: with `sink`: a number in place of the learned one, such as 1.
        per: with `gate`: "head" in place of "channel".
        bandwidth: with `gaussian` (1).
        degree, constant: with `polynomial` (2, 1).
        slopes: with `alibi`: one slope per head, as in `Laplace`.
        rotary: with every name: rotary positions (False), after a convolution; True for `Rotary()`, or a `Rotary`.

    >>> mechanism("bn", beta=0.6).inputs
    (Recenter(beta=0.6, learnable=False),)
    """
    if name not in _ABOUT:
        nearest = did_you_mean(name, _ABOUT, most=3, cutoff=0.3)
        raise ValueError(f"unknown mechanism {name!r}{nearest} There are: {', '.join(_ABOUT)}")
    parts = _parts(name)
    given = dict(options)
    _check_options(name, given, tuple(option for part in parts for option in _OPTIONS.get(part, ())) + _ANY)

    features: FeatureMap = Exponential()
    inputs: tuple[InputMap, ...] = ()
    normalizer: Normalizer = KernelSum()
    training_set: TrainingSet = AllKeys()
    if "sink" in parts:
        normalizer = KernelSum(**({"sink": "learned"} | _take(given, "sink")))
    if "gate" in parts:
        normalizer = Gated(normalizer, **({"per": "channel"} | _take(given, "gate")))
    if "linear" in parts:
        features = given.pop("features", EluPlusOne())
        if not isinstance(features, FeatureMap) or not features.finite:
            raise ValueError(f"mechanism {name!r}: features must be a finite feature map, got {features!r}")
    if "gaussian" in parts:
        features = Gaussian(**_take(given, "gaussian"))
    if "polynomial" in parts:
        features = Polynomial(**_take(given, "polynomial"))
    if "alibi" in parts:
        features = Laplace(**_take(given, "alibi"))
    if "bn" in parts:
        inputs = (_batch_norm(name, given),)
    elif "qk-norm" in parts:
        tempered = given.pop("temperature", False)
        inputs = (RmsNorm(**_take(given, "qk-norm")), *((Scale(learnable=True),) if tempered else ()))
    elif "conv1d" in parts:
        inputs = (DepthwiseConv1d(**_take(given, "conv1d")),)
    elif "conv2d" in parts:
        inputs = (DepthwiseConv2d(**_take(given, "conv2d")),)
    if rotary := given.pop("rotary", False):
        before = [map_ for map_ in inputs if isinstance(map_, TokenMap)]
        inputs = (*before, _rotary(name, rotary), *inputs[len(before) :])
    if "sh" in parts:
        training_set = Pooled(**_take(given, "sh"))
    if "sparse" in parts:
        training_set = Sparse(_pattern(**_take(given, "sparse")), training_set)
    weights = Forget() if "forget" in parts else None
    return Primal(features, normalizer, inputs, training_set, weights=weights)


def as_primal(given: str | Primal) -> Primal:
    """A mechanism's name, or a `Primal` as it is."""
    if isinstance(given, Primal):
        return given
    if isinstance(given, str):
        return mechanism(given)
    raise TypeError(f"expected a Primal or the name of a mechanism, got {given!r}")


def _parts(name: str) -> tuple[str, ...]:
    """
    >>> _parts("linear-bn+sh"), _parts("qk-norm")
    (('linear', 'bn', 'sh'), ('qk-norm',))
    """
    return (name,) if name in _OPTIONS else tuple(name.replace("-", "+").split("+"))


def _check_options(name: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for option in given:
        if option not in known:
            takes = f"It takes: {', '.join(known)}" if known else "It takes none"
            raise ValueError(f"mechanism {name!r} has no option {option!r}{did_you_mean(option, known)} {takes}")


def _take(options: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: options.pop(name) for name in _OPTIONS[part] if name in options}


def _batch_norm(name: str, options: dict[str, Any]) -> PointMap:
    given = _take(options, "bn")
    if given.pop("full", False):
        return BatchNorm(**given)
    if "eps" in given:
        raise ValueError(f"mechanism {name!r}: eps is added to the variance, which only full=True divides by")
    return Recenter(**given)


def _rotary(name: str, given: bool | Rotary) -> Rotary:
    rotary = Rotary() if given is True else given
    if not isinstance(rotary, Rotary):
        raise ValueError(
            f"mechanism {name!r}: rotary must be True, False or a Rotary, such as {Rotary()}; got {given!r}"
        )
    return rotary


def _pattern(pattern: str | Pattern = "strided", stride: int | str | None = None) -> Pattern:
    if not isinstance(pattern, Pattern):
        if pattern not in _PATTERNS:
            raise ValueError(
                f"pattern must be one of {', '.join(_PATTERNS)}, or a Pattern such as {Window(16)!r}; got {pattern!r}"
            )
        pattern = _PATTERNS[pattern]
    if stride is None:
        return pattern
    if pattern != Strided():
        raise ValueError(f"stride goes with pattern='strided'; give a number in {pattern!r} instead")
    if stride == "sqrt":
        return Strided(None)
    if isinstance(stride, str):
        raise ValueError(f"stride must be an integer, or 'sqrt' for round(√N); got {stride!r}")
    return Strided(stride)
