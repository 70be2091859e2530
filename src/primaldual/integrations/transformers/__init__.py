"""Mechanisms in models of transformers: by name as `attn_implementation`, or with what they learn on the model."""

from ...base.packages import needed

needed("transformers", "transformers", "primaldual.integrations.transformers", install='"primaldual[hf]"')

from .conversion import Conversion, convert, revert  # noqa: E402
from .loading import load  # noqa: E402
from .registry import register  # noqa: E402

__all__ = ["Conversion", "convert", "load", "register", "revert"]
