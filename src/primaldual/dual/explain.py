"""The derivation, written out for a reader."""

from __future__ import annotations
from typing import Any


def explain(expansion: Any, format: str, *, length: int | None, heads: int | None, head_dim: int) -> str:
    return ""
