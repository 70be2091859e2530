"""From a primal layer to its support vector expansion."""

from __future__ import annotations

from dataclasses import dataclass

from ..primal import Primal, as_primal
from .cost import Cost, count
from .explain import explain
from .rewrites import REWRITES, Rewrite


@dataclass(frozen=True)
class Expansion:
    """The dual of a primal layer: f(x) = Σ_{j∈S} κ(Tx, Tk_j)/h(Tx) · v_j + b, with v_j = (α_j − α̃_j)/h(Tk_j).

    Args:
        primal: the layer that was stated.
        rewrites: the exact identities that apply to it, in the order in which they are applied.
    """

    primal: Primal
    rewrites: tuple[type[Rewrite], ...]

    def allows(self, rewrite: type[Rewrite]) -> bool:
        """Whether this identity holds here."""
        return rewrite in self.rewrites

    def cost(self, *, queries: int, keys: int, heads: int, head_dim: int, rewritten: bool = True) -> Cost:
        """FLOPs of one layer's forward pass per sequence, after the rewrites (or before them)."""
        return count(self.primal, queries=queries, keys=keys, heads=heads, head_dim=head_dim, rewritten=rewritten)

    def explain(
        self, format: str = "text", *, length: int | None = None, heads: int | None = None, head_dim: int = 64
    ) -> str:
        """The whole derivation, as "text", "markdown" or "latex".

        Args:
            format: how it is written.
            length, heads, head_dim: the example in which cost is counted.
        """
        return explain(self, format, length=length, heads=heads, head_dim=head_dim)


def derive(primal: Primal | str) -> Expansion:
    """The support vector expansion of a primal layer, with the exact rewrites that hold for it.

    >>> from primaldual import mechanism
    >>> [r.name for r in derive(mechanism("bn")).rewrites]
    ['row constants cancel']
    """
    primal = as_primal(primal)
    return Expansion(primal, tuple(r for r in REWRITES if r.refusal(primal) is None))
