"""Attention derived on principle: state a primal layer, get the attention that is its dual."""

from .base import command
from .base.version import __version__ as __version__

command.importing()

from .dual import derive  # noqa: E402
from .nn import MultiheadAttention, TransformerEncoderLayer  # noqa: E402
from .ops import attention  # noqa: E402
from .primal import Primal, mechanism, mechanisms  # noqa: E402

__all__ = ["MultiheadAttention", "Primal", "TransformerEncoderLayer", "attention", "derive", "mechanism", "mechanisms"]
