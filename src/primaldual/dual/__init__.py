"""What follows from a primal layer: its support vector expansion, exact rewrites of it, and the derivation in words."""

from .cost import Cost
from .expansion import Expansion, derive
from .form import Beta, Form, beta_of, form_of
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

__all__ = [
    "REWRITES", "Beta", "Cost", "Expansion", "Form", "GateAfterSum", "GroupHeadsByScale", "KeepPattern",
    "NormsOfKeysAreBias", "PoolBeforeProjection", "Reassociate", "Rewrite", "RowConstantsCancel", "beta_of", "derive",
    "form_of",
]  # fmt: skip
