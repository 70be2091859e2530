"""From a primal layer to its support vector expansion, and from there, by exact rewrites, to what runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..primal import PointMap, Primal, as_primal
from .cost import Cost, count
from .explain import explain
from .rewrites import REWRITES, Rewrite


@dataclass(frozen=True)
class Expansion:
    """The dual of a primal layer: f(x) = Σ_{j∈S} κ(Tx, Tk_j)/h(Tx) · v_j + b, with v_j = (α_j − α̃_j)/h(Tk_j).

    `Expansion(primal)` is the sum as it is written; every rewrite sets one of the other fields. An executor binds
    tensors to the expansion that it is given, and computes what this says.

    Args:
        primal: the layer that was stated.
        rewrites: the identities that were applied, in order.
        one_sided: the last input map acts on the queries alone, as q ↦ (q − a) ⊙ c².
        inputs_pooled: a layer pools its inputs before it projects them.
        associated: Φ(k_j) and v_j are summed into a state first, and queries meet the state.
        pattern_only: of a sparse head only the scores that its pattern keeps are computed.
        by_scale: heads of one scale run as one call.
    """

    primal: Primal
    rewrites: tuple[type[Rewrite], ...] = ()
    one_sided: bool = False
    inputs_pooled: bool = False
    associated: bool = False
    pattern_only: bool = False
    by_scale: bool = False

    @property
    def as_written(self) -> Expansion:
        """The same sum before any rewrite."""
        return Expansion(self.primal)

    @property
    def maps(self) -> tuple[PointMap, ...]:
        """The input maps that queries and keys both go through."""
        return self.primal.point_maps[:-1] if self.one_sided else self.primal.point_maps

    @property
    def query_map(self) -> PointMap | None:
        """The input map of which only the queries' side is left."""
        return self.primal.point_maps[-1] if self.one_sided else None

    def rewritten(self, *rewrites: type[Rewrite]) -> Expansion:
        """With those of the identities applied that hold here."""
        found = self
        for rewrite in rewrites:
            if rewrite not in found.rewrites and rewrite.refusal(self.primal) is None:
                found = rewrite.apply(found)
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
