"""Problems at random: keys, targets and what is learned, at a length that the mechanism takes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..dual.form import over_of, pooling_of
from ..ops import attention
from ..primal import DepthwiseConv2d, Gated, Pooled, Primal, Sparse, TrainingSet

LENGTH = 24
"""Keys of a problem, where nothing else is said."""


class Drawn(NamedTuple):
    """A problem: keys, queries [1, H, N, D], targets and values [1, H, N, Dv], and what the mechanism learns.

    Where each output has a regression of its own, H counts every output of a head, and Dv is 1.
    """

    primal: Primal
    keys: Tensor
    queries: Tensor
    targets: Tensor
    values: Tensor
    parameters: dict[str, Tensor]  # also what there is for every key, but for a gate
    directions: Tensor | None = None  # [H, D]: g(x) = σ(direction·x)
    outputs: int = 1  # that `stated` has of each head, where they are regressions of their own
    stated: Primal | None = None

    def gate(self, x: Tensor) -> Tensor | None:
        """g at the points x, [1, H, N]; None where there is no gate."""
        return None if self.directions is None else (x @ self.directions.unsqueeze(-1)).squeeze(-1).sigmoid()

    @property
    def at_keys(self) -> dict[str, Tensor]:
        """The parameters of a regression."""
        gate = self.gate(self.keys)
        return self.parameters if gate is None else self.parameters | {"gate": gate}

    def attend(self, x: Tensor, values: Tensor) -> Tensor:
        """What `attention` gives at the points x, of the mechanism as it is stated."""
        parameters, gate = self.parameters, self.gate(x)
        if gate is not None:
            parameters = parameters | {"gate": gate}
        if self.stated is None:
            out = attention(x, self.keys, values, self.primal, parameters=parameters)
            assert isinstance(out, Tensor)
            return out
        own = self.primal.by_head | self.primal.made(1, 1).keys()

        def of_heads(y: Tensor, dim: int) -> Tensor:  # the outputs of a head have the same
            return y[(slice(None),) * dim + (slice(None, None, self.outputs),)]

        def side_by_side(y: Tensor) -> Tensor:  # [1, H·Dv, N] to [1, H, N, Dv]
            return y.unflatten(1, (-1, self.outputs)).movedim(2, -1)

        assert gate is not None
        heads = {n: of_heads(y, y.dim() - 1 if y.dim() == 1 else y.dim() - 2) if n in own else y
                 for n, y in self.parameters.items()}  # fmt: skip
        out = attention(
            of_heads(x, 1), of_heads(self.keys, 1), side_by_side(values.squeeze(-1)), self.stated,
            parameters=heads | {"gate": side_by_side(gate)},
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.movedim(-1, 2).flatten(1, 2).unsqueeze(-1)


def length_that_hides(training_set: TrainingSet) -> int:
    """A length at which some query is not fitted to every key, where the training set is a subset per query."""
    for length in (LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH):
        subset = training_set.visible(1, length, length, torch.device("cpu"))
        if subset is None or not bool(subset.all()):
            return length
    return LENGTH


def fitting_length(primal: Primal, length: int) -> int:
    """The nearest length that a convolution or a pooling over a grid takes."""
    for spec in (*primal.token_maps, pooling_of(primal.training_set)):
        grid = getattr(spec, "grid", None)
        if grid is not None:
            return int(grid[0] * grid[1] + getattr(spec, "prefix", 0))
        if isinstance(spec, DepthwiseConv2d):
            return max(1, round(math.sqrt(max(1, length - spec.prefix)))) ** 2 + spec.prefix
    return length


def draw(primal: Primal, length: int, head_dim: int, heads: int, outputs: int, seed: int) -> Drawn:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys, queries = normal(1, heads, length, head_dim), normal(1, heads, length, head_dim)
    targets, values = normal(1, heads, length, outputs), normal(1, heads, length, outputs)
    # away from the start, where convolutions are the identity
    learned = {name: x.double() + 0.3 * normal(*x.shape) for name, x in primal.learned(heads, head_dim).items()}
    for name, part in primal.made(heads, outputs).items():
        if name != "gate":
            learned[name] = part.function(part.start.double()[:, None] + normal(1, heads, length))
    if not isinstance(primal.normalizer, Gated):
        return Drawn(primal, keys, queries, targets, values, learned)
    if primal.normalizer.per == "head":
        return Drawn(primal, keys, queries, targets, values, learned, normal(heads, head_dim))
    return _by_output(Drawn(primal, keys, queries, targets, values, learned), normal(heads * outputs, head_dim))


def _by_output(p: Drawn, directions: Tensor) -> Drawn:
    """The same with every output as a head of its own, and its own gate."""
    outputs, normalizer, inner = p.values.shape[-1], p.primal.normalizer, over_of(p.primal.training_set)
    assert isinstance(normalizer, Gated)
    own = p.primal.by_head | p.primal.made(1, 1).keys()

    def repeated(x: Tensor, dim: int = 1) -> Tensor:
        return x.repeat_interleave(outputs, dim)

    def single(x: Tensor) -> Tensor:  # [1, H, N, Dv] to [1, H·Dv, N, 1]
        return x.movedim(-1, 2).flatten(1, 2).unsqueeze(-1)

    training_set = p.primal.training_set
    if type(inner) is Pooled:
        scales = tuple(s for s in inner.head_scales(p.keys.shape[1]) for _ in range(outputs))
        inner = replace(inner, scales=scales)
        training_set = replace(training_set, over=inner) if type(training_set) is Sparse else inner
    primal = replace(p.primal, normalizer=Gated(normalizer.over), training_set=training_set)
    learned = {n: repeated(x, 1 if x.dim() == 3 else 0) if n in own or n.startswith("pool_kernel") else x
               for n, x in p.parameters.items()}  # fmt: skip
    return Drawn(
        primal, repeated(p.keys), repeated(p.queries), single(p.targets), single(p.values), learned, directions,
        outputs, p.primal,
    )  # fmt: skip
