"""Numbers that a layer makes of its input for every head and token: gates, decays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..primal import PerToken


class MadeOfInput(nn.Linear):
    """A function of an affine map of the input, [N, L, E] to [N, heads, L] or [N, heads, L, channels].

    The matrix starts at zero, so that the layer draws no random numbers that it would not draw without it, and is at
    first what `attention` is without these numbers.
    """

    def __init__(self, part: PerToken, inputs: int, **factory: Any) -> None:
        self.of, self.function, self.start = part.of, part.function, part.start
        super().__init__(inputs, part.start.numel(), **factory)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(self.start.flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x).unflatten(-1, self.start.shape).movedim(1, 2))

    @property
    def plain(self) -> bool:
        """Whether calling it does no more than is said here: it is no subclass, and no hook looks on."""
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        return type(self) is MadeOfInput and not any(hooks)
