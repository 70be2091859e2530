"""Attention derived on principle: state a primal layer, get the attention that is its dual."""

from .base.version import __version__ as __version__
from .dual import derive
from .nn import MultiheadAttention, TransformerEncoderLayer
from .ops import attention
from .primal import Primal, mechanism, mechanisms

__all__ = ["MultiheadAttention", "Primal", "TransformerEncoderLayer", "attention", "derive", "mechanism", "mechanisms"]
