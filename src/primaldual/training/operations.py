"""The operations that an encoder is made of, for all members at once: by torch's operators, or by kernels.

Activations are [members, batch · length, width], parameters [members, …] by their names in the model.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, gelu, layer_norm, pad

from ..base.randomness import dropout
from ..kernels import encoder as kernels
from .stacked import Stacked


class Operations(Protocol):
    """What a forward is written in. A name is that of a module of the model."""

    padding: Tensor | None

    def embed(self, series: Tensor, channels: int, width: int) -> Tensor:
        """dropout(√width · (W s + b) + p) of series [members, batch, length, at least so many channels]."""
        ...

    def add_positions(self, x: Tensor, length: int) -> Tensor:
        """dropout(x + p), of tokens that were looked up."""
        ...

    def norm_beside(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Layer norm of x, and x, for blocks with their norms first."""
        ...

    def linear(self, name: str, x: Tensor) -> Tensor:
        """W x + b, of few rows."""
        ...

    def project(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values of x side by side; and x, for `add_and_norm` alone."""
        ...

    def add_and_norm_beside(self, x: Tensor, branch: Tensor, linear: str, norm: str) -> tuple[Tensor, Tensor]:
        """norm(r) and r = x + dropout(W branch + b), for blocks with their norms first."""
        ...

    def feed_forward_beside(
        self, x: Tensor, residual: Tensor, first: str, second: str, norm: str
    ) -> tuple[Tensor, Tensor]:
        """norm(r) and r = residual + dropout(W₂ dropout(gelu(W₁ x + b₁)) + b₂)."""
        ...

    def add_and_norm(self, x: Tensor, branch: Tensor, linear: str, norm: str) -> Tensor:
        """norm(x + dropout(W branch + b))."""
        ...

    def feed_forward(self, x: Tensor, first: str, second: str, norm: str) -> Tensor:
        """norm(x + dropout(W₂ dropout(gelu(W₁ x + b₁)) + b₂))."""
        ...

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Batch norm where the module has running moments, else layer norm."""
        ...

    def head(self, name: str, x: Tensor, batch: int) -> Tensor:
        """W flatten(mask(dropout(gelu(x)))) + b, [members, batch, outputs]."""
        ...


class TorchOperations:
    """By torch's operators: any device and dtype."""

    def __init__(self, weights: Stacked, p: float, padding: Tensor | None, training: bool) -> None:
        self.parameters, self.buffers, self.p = weights.parameters, weights.buffers, p
        self.generator = weights.generator
        self.padding, self.training = padding, training

    def embed(self, series: Tensor, channels: int, width: int) -> Tensor:
        _, batch, length, _ = series.shape
        x = series[..., :channels].flatten(1, 2)
        x = self.linear("embedding", x) * math.sqrt(width)
        x = (x.unflatten(1, (batch, length)) + self.parameters["positions"].unsqueeze(1)).flatten(1, 2)
        return self._drop(x)

    def add_positions(self, x: Tensor, length: int) -> Tensor:
        positions = self.parameters["positions"][:, None, :length]
        return self._drop((x.unflatten(1, (-1, length)) + positions).flatten(1, 2))

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        return torch.baddbmm(bias.unsqueeze(1), x.to(weight.dtype), weight.mT)

    def project(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = (self.parameters[f"{name}.in_proj_{part}"] for part in ("weight", "bias"))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT), x

    def norm_beside(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(name, x), x

    def add_and_norm(self, x: Tensor, branch: Tensor, linear: str, norm: str) -> Tensor:
        return self.add_and_norm_beside(x, branch, linear, norm)[0]

    def add_and_norm_beside(self, x: Tensor, branch: Tensor, linear: str, norm: str) -> tuple[Tensor, Tensor]:
        r = x + self._drop(self.linear(linear, branch))
        return self.norm(norm, r), r

    def feed_forward(self, x: Tensor, first: str, second: str, norm: str) -> Tensor:
        return self.feed_forward_beside(x, x, first, second, norm)[0]

    def feed_forward_beside(
        self, x: Tensor, residual: Tensor, first: str, second: str, norm: str
    ) -> tuple[Tensor, Tensor]:
        hidden = self._drop(gelu(self.linear(first, x)))
        r = residual + self._drop(self.linear(second, hidden))
        return self.norm(norm, r), r

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        mean, variance = (self.buffers.get(f"{name}.running_{part}") for part in ("mean", "var"))
        if mean is None or variance is None:
            normal = layer_norm(x, x.shape[-1:])
            return torch.addcmul(bias.unsqueeze(1).to(x.dtype), normal, weight.unsqueeze(1).to(x.dtype))
        members = x.shape[0]
        flat = x.transpose(0, 1).flatten(1)  # a member's channel is a channel
        y = batch_norm(flat, mean.view(-1), variance.view(-1), weight.flatten(), bias.flatten(), self.training)
        return y.unflatten(1, (members, -1)).transpose(0, 1)

    def head(self, name: str, x: Tensor, batch: int) -> Tensor:
        x = self._drop(gelu(x)).unflatten(1, (batch, -1))
        if self.padding is not None:
            x = x.masked_fill(self.padding.unsqueeze(-1), 0.0)
        return self.linear(name, x.flatten(2))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training, self.generator)


class KernelOperations:
    """By the kernels of `kernels.encoder`, where they are usable.

    Args:
        places: of the model that have dropout.
    """

    def __init__(self, weights: Stacked, p: float, padding: Tensor | None, training: bool, places: int) -> None:
        self.parameters, self.buffers, self.training = weights.parameters, weights.buffers, training
        self.padding = None if padding is None else padding.contiguous()
        self._p, self._place = p, 0
        if training and p:
            limit = 2**31
            self._seeds = torch.randint(-limit, limit, (places,), dtype=torch.int32, device=weights.matrix.device)

    def embed(self, series: Tensor, channels: int, width: int) -> Tensor:
        own = self.parameters
        weight = pad(own["embedding.weight"], (0, series.shape[-1] - channels))
        x = kernels.linear(series.flatten(1, 2), weight)
        return kernels.embed(x, own["embedding.bias"], own["positions"], math.sqrt(width), self._next_dropout())

    def add_positions(self, x: Tensor, length: int) -> Tensor:
        positions = self.parameters["positions"][:, :length]
        return kernels.embed(x, x.new_zeros(len(x), x.shape[-1]), positions, 1.0, self._next_dropout())

    def linear(self, name: str, x: Tensor) -> Tensor:
        return TorchOperations.linear(self, name, x)  # type: ignore[arg-type]

    def project(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.linear_beside(
            x, self.parameters[f"{name}.in_proj_weight"], self.parameters[f"{name}.in_proj_bias"]
        )

    def add_and_norm(self, x: Tensor, branch: Tensor, linear: str, norm: str) -> Tensor:
        drop = self._next_dropout()
        return kernels.add_norm(x, branch, *self._of(linear), self._normal(norm), drop, self.training)

    def norm_beside(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.norm_beside(x, self._normal(name))

    def add_and_norm_beside(self, x: Tensor, branch: Tensor, linear: str, norm: str) -> tuple[Tensor, Tensor]:
        drop = self._next_dropout()
        return kernels.add_norm_beside(x, branch, *self._of(linear), self._normal(norm), drop, self.training)

    def feed_forward_beside(
        self, x: Tensor, residual: Tensor, first: str, second: str, norm: str
    ) -> tuple[Tensor, Tensor]:
        drops = self._next_dropout(), self._next_dropout()
        return kernels.feed_forward_beside(
            x, residual, *self._of(first), *self._of(second), self._normal(norm), drops, self.training
        )

    def feed_forward(self, x: Tensor, first: str, second: str, norm: str) -> Tensor:
        drops = self._next_dropout(), self._next_dropout()
        return kernels.feed_forward(x, *self._of(first), *self._of(second), self._normal(norm), drops, self.training)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return TorchOperations.norm(self, name, x)  # type: ignore[arg-type]

    def head(self, name: str, x: Tensor, batch: int) -> Tensor:
        z = x.unflatten(1, (batch, -1))
        return kernels.head(z, *self._of(name), self.padding, self._next_dropout())

    def _of(self, name: str) -> tuple[Tensor, Tensor]:
        return self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]

    def _normal(self, name: str) -> kernels.Norm:
        buffers = self.buffers
        return kernels.Norm(*self._of(name), buffers.get(f"{name}.running_mean"), buffers.get(f"{name}.running_var"))

    def _next_dropout(self) -> kernels.Dropout | None:
        """Dropout at the next place of the model."""
        if not (self.training and self._p):
            return None
        self._place += 1
        return kernels.Dropout(self._p, self._seeds[self._place - 1 : self._place])
