"""What a layer makes of its input for every token and hands to the attention: gates, decays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor


class PerToken(NamedTuple):
    """Numbers for every head and token: a function of an affine map A x + a of a layer's input; A is 0 at the start.

    `attention` takes them in `parameters` by name, [batch, heads, tokens], or [batch, heads, tokens, channels]; where
    they are not given it takes those of the start, function(a).
    """

    of: Literal["query", "key"]
    start: Tensor  # [heads] or [heads, channels]: a at the start
    function: Callable[[Tensor], Tensor]
