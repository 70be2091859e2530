"""What a mechanism needs to be decoded step by step, and why some cannot be.

Parts of one's own are called where the definition calls them, point by point: features, normalizers, maps of points
and maps of places. What says how the whole sequence becomes points (a training set, a pattern, weights of points, a
map that mixes tokens) has a form for single steps by exact type alone.
"""

from __future__ import annotations

from ...dual.form import form_of, over_of, pattern_of, pooling_of
from ...primal import AllKeys, DepthwiseConv1d, Fixed, Forget, Primal, Sparse, Strided, Window
from ..problem import CausalFormError, UnsupportedError

WHOLE = "which is computed of the whole sequence: nothing says what one more token changes"


def refusal(primal: Primal, heads: int) -> str | None:
    """Why no cache holds what this mechanism needs; None where one does."""
    for map_ in primal.mixing_maps:
        if type(map_) is not DepthwiseConv1d:
            return f"{map_!r} is a map of the sequence of its own, {WHOLE}"
    form, stated = form_of(primal), primal.training_set
    if form.subset == "own" or (type(stated) not in (AllKeys, Sparse) and pooling_of(stated) is None):
        return f"{stated!r} is a training set of its own, {WHOLE}"
    if pooling_of(stated) is None and type(over_of(stated)) is not AllKeys:
        return f"{over_of(stated)!r} is a training set of its own, {WHOLE}"
    pattern = pattern_of(stated)
    if pattern is not None and type(pattern) not in (Strided, Fixed, Window):
        return f"{pattern!r} is a pattern of its own, {WHOLE}"
    if primal.weights is not None and type(primal.weights) is not Forget:
        return f"{primal.weights!r} are weights of its own, {WHOLE}"
    return None


def check(primal: Primal, heads: int) -> None:
    """Raise where a mechanism cannot be decoded, with the reason."""
    if reason := primal.causal_refusal(heads):
        raise CausalFormError(f"this cannot be decoded token by token: {reason}")
    if reason := refusal(primal, heads):
        raise UnsupportedError(f"this cannot be decoded with a cache: {reason}")
