"""Text from language models: one token after the other, by a cache that scaled heads keep small."""

from ..ops.decoding import Cache
from .beams import beam_search
from .choice import Choice
from .generate import Generated, generate
from .prompts import left_padded
from .stream import stream

__all__ = ["Cache", "Choice", "Generated", "beam_search", "generate", "left_padded", "stream"]
