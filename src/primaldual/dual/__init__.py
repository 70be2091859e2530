"""What follows from a primal layer: its support vector expansion, exact rewrites of it, and the derivation in words."""

from .cost import Cost
from .expansion import Expansion, derive
from .rewrites import REWRITES, GroupHeadsByScale, PoolBeforeProjection, Reassociate, Rewrite, RowConstantsCancel

__all__ = [
    "REWRITES", "Cost", "Expansion", "GroupHeadsByScale", "PoolBeforeProjection", "Reassociate", "Rewrite",
    "RowConstantsCancel", "derive",
]  # fmt: skip
