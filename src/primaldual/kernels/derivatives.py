"""What has a gradient, and no second derivative.

A gradient that a kernel computes is a constant to autograd, unless it is told how to differentiate it. torch's
`once_differentiable` raises where somebody differentiates through that gradient alone; beside another path to the same
inputs (`torch.autograd.grad(penalty, inputs)`) its share is left out without a word. So what is asked for a gradient
that can be differentiated says no at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Result = TypeVar("Result")


def differentiated_once(backward: Callable[P, Result]) -> Callable[P, Result]:
    """A backward pass that refuses `create_graph=True`."""

    @functools.wraps(backward)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a fused kernel can be differentiated only once, and create_graph=True asks for more; "
                'attention with impl="reference" can be differentiated again'
            )
        return backward(*args, **kwargs)

    return checked
