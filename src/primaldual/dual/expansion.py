"""From a primal layer to its support vector expansion, and from there, by exact rewrites, to what runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..primal import Pattern, PointMap, Primal, as_primal
from .cost import Cost, count
from .explain import explain
from .form import pattern_of
from .rewrites import (
    REWRITES,
    GateAfterSum,
    GroupHeadsByScale,
    KeepPattern,
    NormsOfKeysAreBias,
    PoolBeforeProjection,
    Reassociate,
    Rewrite,
    RowConstantsCancel,
)


@dataclass(frozen=True)
class Expansion:
    """The dual of a primal layer: f(x) = Σ_{j∈S} κ(Tx, Tk_j)/h(Tx) · v_j + b, with v_j = (α_j − α̃_j)/h(Tk_j).

    `Expansion(primal)` is the sum as it is written, and every rewrite changes what the properties below say. An
    executor binds tensors to the expansion that it is given, and computes what they say, or refuses.

    Args:
        primal: the layer that was stated.
        rewrites: the identities that were applied, in order.
    """

    primal: Primal
    rewrites: tuple[type[Rewrite], ...] = ()

    @property
    def as_written(self) -> Expansion:
        """The same sum before any rewrite."""
        return Expansion(self.primal)

    @property
    def maps(self) -> tuple[PointMap, ...]:
        """The input maps that queries and keys both go through."""
        maps = self.primal.point_maps
        return maps[:-1] if RowConstantsCancel in self.rewrites else maps

    @property
    def query_map(self) -> PointMap | None:
        """The last input map, where it acts on the queries alone, as q ↦ (q − a) ⊙ c²."""
        return self.primal.point_maps[-1] if RowConstantsCancel in self.rewrites else None

    @property
    def biased_by_norms(self) -> bool:
        """Whether the length of a key is a bias on its score, which is a product as under softmax."""
        return NormsOfKeysAreBias in self.rewrites

    @property
    def inputs_pooled(self) -> bool:
        """Whether a layer pools its inputs before it projects them."""
        return PoolBeforeProjection in self.rewrites

    @property
    def gates_outputs(self) -> bool:
        """Whether a gate multiplies the output, and the sum is that of the primal without it."""
        return GateAfterSum in self.rewrites

    @property
    def associated(self) -> bool:
        """Whether Φ(k_j) and v_j are summed into a state first, and queries meet the state."""
        return Reassociate in self.rewrites

    @property
    def pattern(self) -> Pattern | None:
        """The pattern whose pairs alone are scored; None where every pair is."""
        return pattern_of(self.primal.training_set) if KeepPattern in self.rewrites else None

    def calls(self, heads: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(scale, heads) of every call: those of one scale, or each head by itself.

        Heads over the tokens themselves, of scale 1, have the same keys and are one call as the sum is written.
        """
        scales = self.primal.training_set.head_scales(heads)
        if max(scales) == 1:
            return ((1, tuple(range(heads))),)
        if GroupHeadsByScale in self.rewrites:
            return GroupHeadsByScale.groups(scales)
        return tuple((scale, (head,)) for head, scale in enumerate(scales))

    def rewritten(self, *rewrites: type[Rewrite]) -> Expansion:
        """With those of the identities applied that hold here."""
        found = self
        for rewrite in rewrites:
            if rewrite not in found.rewrites and rewrite.refusal(self.primal) is None:
                found = replace(found, rewrites=(*found.rewrites, rewrite))
        return found

    def cost(self, *, queries: int, keys: int, heads: int, head_dim: int) -> Cost:
        """FLOPs of one layer's forward pass per sequence."""
        return count(self, queries=queries, keys=keys, heads=heads, head_dim=head_dim)

    def explain(
        self, format: str = "text", *, length: int | None = None, heads: int | None = None, head_dim: int = 64
    ) -> str:
        """The whole derivation, as "text", "markdown" or "latex".

        Args:
            format: how it is written.
            length, heads, head_dim: the example in which cost is counted.
        """
        return explain(self, format, length=length, heads=heads, head_dim=head_dim)


def derive(primal: Primal | str, rewrites: tuple[type[Rewrite], ...] = REWRITES) -> Expansion:
    """The support vector expansion of a primal layer, with the exact rewrites that hold for it.

    Args:
        primal: the layer, or a mechanism's name.
        rewrites: those that may be applied; none gives the sum as it is written.

    >>> from primaldual import mechanism
    >>> [r.name for r in derive(mechanism("bn")).rewrites]
    ['row constants cancel']
    """
    if torch.compiler.is_compiling():  # which does not trace through a cache
        return Expansion(as_primal(primal)).rewritten(*rewrites)
    return _derived(as_primal(primal), rewrites)


@lru_cache(maxsize=1024)
def _derived(primal: Primal, rewrites: tuple[type[Rewrite], ...]) -> Expansion:
    return Expansion(primal).rewritten(*rewrites)
