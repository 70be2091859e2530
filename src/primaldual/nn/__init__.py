"""torch modules: what is learned lives here."""

from typing import TYPE_CHECKING, Any

from .encoder import TransformerEncoderLayer
from .multihead import MultiheadAttention
from .projection import ConvProjection

if TYPE_CHECKING:
    from .solved import SolvedAttention

__all__ = ["ConvProjection", "MultiheadAttention", "SolvedAttention", "TransformerEncoderLayer"]


def __getattr__(name: str) -> Any:
    """`SolvedAttention` is imported when it is asked for: nothing else here needs the solver."""
    if name == "SolvedAttention":
        from .solved import SolvedAttention

        return SolvedAttention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
