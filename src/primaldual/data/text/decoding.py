"""From tokens to text, as they come: no letter is said before all its bytes are there."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """Text of one token after the other."""

    def add(self, token: int) -> str:
        """What one more token says for certain; what it begins only comes later."""

    def end(self) -> str:
        """What has begun, where no more tokens come."""


class ByteDecoder:
    """Of bytes in UTF-8; those that are none are shown as the replacement character.

    >>> decoder = ByteDecoder()
    >>> [decoder.add(token) for token in "né".encode()]
    ['n', '', 'é']
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class SubwordDecoder:
    """Of a tokenizer's tokens: what a few of them say together beyond what they said without the last.

    Args:
        decode: from tokens to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._said = 0  # tokens whose text is out; those before them say how the next ones begin

    def add(self, token: int) -> str:
        self._tokens.append(token)
        new = self._new()
        if new.endswith(UNKNOWN) or not new:  # a letter may not be whole
            return ""
        self._tokens, self._said = self._tokens[self._said :], len(self._tokens) - self._said
        return new

    def end(self) -> str:
        return self._new()

    def _new(self) -> str:
        before = self._decode(self._tokens[: self._said]) if self._said else ""
        return self._decode(self._tokens)[len(before) :]
