"""Attention derived on principle: state a primal layer, get the attention that is its dual.

What is named here is imported when it is first asked for: torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base.version import __version__ as __version__

if TYPE_CHECKING:
    from .dual import derive
    from .nn import MultiheadAttention, TransformerEncoderLayer
    from .ops import attention
    from .primal import Primal, mechanism, mechanisms

__all__ = ["MultiheadAttention", "Primal", "TransformerEncoderLayer", "attention", "derive", "mechanism", "mechanisms"]

_FROM = {
    "derive": "dual", "MultiheadAttention": "nn", "TransformerEncoderLayer": "nn", "attention": "ops",
    "Primal": "primal", "mechanism": "primal", "mechanisms": "primal",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _FROM:
        found = getattr(import_module(f".{_FROM[name]}", __name__), name)
        globals()[name] = found
        return found
    if name in _FROM.values():
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
