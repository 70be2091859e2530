"""torch modules: what is learned lives here."""

from .encoder import TransformerEncoderLayer
from .multihead import MultiheadAttention
from .projection import ConvProjection

__all__ = ["ConvProjection", "MultiheadAttention", "TransformerEncoderLayer"]
