"""Attention step by step: what each mechanism keeps of the tokens so far, and the outputs of the next ones."""

from .cache import AttentionCache
from .refusals import check, refusal
from .rows import Piece, Rows
from .whole import Cache

__all__ = ["AttentionCache", "Cache", "Piece", "Rows", "check", "refusal"]
