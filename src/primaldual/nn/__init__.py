"""torch modules: what is learned lives here."""

from .encoder import TransformerEncoderLayer
from .multihead import MultiheadAttention
from .projection import ConvProjection
from .solved import SolvedAttention

__all__ = ["ConvProjection", "MultiheadAttention", "SolvedAttention", "TransformerEncoderLayer"]
