"""Text to model, byte by byte or in the words of a tokenizer: prepared once, kept as one flat array of tokens."""

from .loading import load, missing
from .texts import TextPart, TextSet
from .tokenizers import Bytes, Subwords, Tokenizer

__all__ = ["Bytes", "Subwords", "TextPart", "TextSet", "Tokenizer", "load", "missing"]
