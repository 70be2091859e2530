"""The named mechanisms as a table."""

from __future__ import annotations

from rich.table import Table

from ..base.terminal import titled
from ..primal import (
    AllKeys,
    DepthwiseConv1d,
    DepthwiseConv2d,
    EluPlusOne,
    Exponential,
    Gated,
    Gaussian,
    KernelSum,
    Laplace,
    Polynomial,
    Pooled,
    RmsNorm,
    Sparse,
    Spec,
    about,
    mechanism,
    mechanisms,
)

LEGEND = (
    "exp: κ(x, y) = exp(x·y/√D). L: exp(−m|i − j|). Σκ: h(x) = Σ_{j∈S} κ(x, k_j). μ: mean key. pooled: at each head's "
    "own scale. c: a sink. g: a gate. w: points have weights."
)


def mechanisms_table() -> Table:
    """One line per mechanism: its primal layer in short, and the paper's name for it."""
    table = titled("y = W Φ(T x) / h(T x) + b, fitted to S")
    table.add_column("mechanism", style="bold cyan", no_wrap=True)
    for heading in "ΦhTS":
        table.add_column(heading, no_wrap=True)
    table.add_column("known as", no_wrap=True)
    for name in mechanisms():
        primal = mechanism(name)
        maps = ", ".join(map(_short, primal.inputs)) or "–"
        points = _short(primal.training_set) + ", w" * (primal.weights is not None)
        parts = (_short(primal.features), _short(primal.normalizer), maps, points)
        table.add_row(name, *parts, about(name))
    return table


def _short(spec: Spec) -> str:
    """A spec in a word or two; those without a short form say what they are."""
    match spec:
        case Laplace():
            return "exp·L"
        case Exponential():
            return "exp"
        case Gated(over=over):
            return f"{_short(over)}/g" if over == KernelSum() else f"({_short(over)})/g"
        case KernelSum(sink=sink):
            return "Σκ" if sink == 0 else "c+Σκ"
        case EluPlusOne():
            return "elu+1"
        case Gaussian():
            return "Gauss"
        case Polynomial(degree=degree):
            return f"pow {degree}"
        case RmsNorm():
            return "RMS norm"
        case DepthwiseConv1d():
            return "Conv1D"
        case DepthwiseConv2d():
            return "Conv2D"
        case AllKeys():
            return "all keys"
        case Pooled():
            return "pooled"
        case Sparse(pattern, over):
            kind = type(pattern).__name__.lower()
            return kind if isinstance(over, AllKeys) else f"{kind}, {_short(over)}"
        case _:
            return spec.text()
