"""The paper's mechanisms by name; each is a value of `Primal`."""

from __future__ import annotations

import difflib
from typing import Any

from ._primal import Primal
from .features import EluPlusOne, Exponential, FeatureMap
from .inputs import BatchNorm, DepthwiseConv1d, DepthwiseConv2d, InputMap, PointMap, Recenter, RmsNorm
from .patterns import Fixed, Pattern, Strided, Window
from .training_sets import AllKeys, Pooled, Sparse, TrainingSet

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
}
_PATTERNS: dict[str, Pattern] = {"strided": Strided(), "fixed": Fixed(), "window": Window()}


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
        scales, how, prefix, grid: with `sh`: as in `Pooled`.
        size, causal, grid, prefix: with `conv1d`, `conv2d`: kernel size (5, or (2, 2)), causal form (1-D), patch grid.
        pattern: with `sparse`: a `Pattern`, or "strided", "fixed" or "window".
        features: with `linear`: another finite Φ.

    >>> mechanism("bn", beta=0.6).inputs
    (Recenter(beta=0.6, learnable=False),)
    """
    if name not in _ABOUT:
        near = difflib.get_close_matches(str(name), _ABOUT, n=3, cutoff=0.3)
        hint = f"did you mean {', '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"unknown mechanism {name!r}; {hint}There are: {', '.join(_ABOUT)}")
    given = dict(options)
    base, _, tail = name.partition("-") if name != "qk-norm" else (name, "", "")
    parts = {base, *tail.split("+")} if tail else set(base.split("+"))

    features: FeatureMap = Exponential()
    inputs: tuple[InputMap, ...] = ()
    training_set: TrainingSet = AllKeys()
    if "linear" in parts:
        features = given.pop("features", EluPlusOne())
        if not isinstance(features, FeatureMap) or not features.finite:
            raise ValueError(f"mechanism {name!r}: features must be a finite feature map, got {features!r}")
    if "bn" in parts:
        inputs = (_batch_norm(given),)
    elif "qk-norm" in parts:
        inputs = (RmsNorm(**_take(given, "eps")),)
    elif "conv1d" in parts:
        inputs = (DepthwiseConv1d(**_take(given, "size", "causal")),)
    elif "conv2d" in parts:
        inputs = (DepthwiseConv2d(**_take(given, "size", "grid", "prefix")),)
    if "sh" in parts:
        training_set = Pooled(**_take(given, "scales", "how", "prefix", "grid"))
    if "sparse" in parts:
        training_set = Sparse(_pattern(given.pop("pattern", "strided")), training_set)
    if given:
        raise ValueError(f"mechanism {name!r} has no option {', '.join(map(repr, sorted(given)))}")
    return Primal(features=features, inputs=inputs, training_set=training_set)


def as_primal(given: str | Primal) -> Primal:
    """A mechanism's name, or a `Primal` as it is."""
    if isinstance(given, Primal):
        return given
    if isinstance(given, str):
        return mechanism(given)
    raise TypeError(f"expected a Primal or the name of a mechanism, got {given!r}")


def _take(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}


def _batch_norm(options: dict[str, Any]) -> PointMap:
    if options.pop("full", False):
        return BatchNorm(**_take(options, "eps", "beta", "learnable"))
    return Recenter(**_take(options, "beta", "learnable"))


def _pattern(given: str | Pattern) -> Pattern:
    if isinstance(given, Pattern):
        return given
    if given not in _PATTERNS:
        raise ValueError(
            f"pattern must be one of {', '.join(_PATTERNS)}, or a Pattern such as {Window(16)!r}; got {given!r}"
        )
    return _PATTERNS[given]
