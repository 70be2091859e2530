"""From documents to tokens: their bytes, or what a tokenizer of the `tokenizers` library makes of them."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...base.packages import needed
from ..errors import DataFormatError, DataNotFoundError
from .decoding import ByteDecoder, Decoder, SubwordDecoder


class Tokenizer(Protocol):
    """What makes tokens of a document; one more token stands between documents.

    Attributes:
        name: which tells it from others.
        vocabulary: how many tokens there can be, the separator among them.
        separator: no token of any document.
        dtype: of the tokens, in numpy's words.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def dtype(self) -> str: ...

    def encode(self, content: bytes, where: str) -> np.ndarray:
        """The tokens of a document, which an error calls `where`."""

    def decoder(self) -> Decoder:
        """The way back, one token after the other."""


class Bytes:
    """Each byte is a token. 0, which no text has inside, stands between documents.

    >>> Bytes().encode(b"ab", "a file").tolist()
    [97, 98]
    """

    name, vocabulary, separator, dtype = "bytes", 256, 0, "u1"

    def encode(self, content: bytes, where: str) -> np.ndarray:
        if b"\0" in content:
            raise DataFormatError(where, None, "there is a byte 0 in it, so this is no text; give files of plain text")
        return np.frombuffer(content, np.uint8)

    def decoder(self) -> Decoder:
        return ByteDecoder()


class Subwords:
    """A tokenizer of the `tokenizers` library, without its special tokens, and one token more between documents.

    Args:
        path: the file that `Tokenizer.save` writes, often called tokenizer.json.
    """

    dtype = "<i4"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise DataNotFoundError(
                f"there is no file {self.path}; give the tokenizer.json that the tokenizers library writes "
                f"(Tokenizer.save), and that models on the Hugging Face hub have beside them"
            )
        about = hashlib.sha256(self.path.read_bytes()).hexdigest()[:8]
        folder = self.path.resolve().parent.name
        self.name = f"{folder if self.path.stem == 'tokenizer' else self.path.stem}-{about}"

    @cached_property
    def _made(self) -> Any:
        library = needed("tokenizers", "tokenizers", "a tokenizer", '"primaldual[text]"')
        try:
            return library.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library has no class of its own for it
            raise DataFormatError(str(self.path), None, f"not a file of the tokenizers library ({error})") from None

    @cached_property
    def separator(self) -> int:
        """The one after all of its own."""
        return max(self._made.get_vocab().values()) + 1

    @property
    def vocabulary(self) -> int:
        """Its own tokens, and the separator."""
        return self.separator + 1

    def encode(self, content: bytes, where: str) -> np.ndarray:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"it is not UTF-8 ({error}), which a tokenizer needs; bytes take any text"
            raise DataFormatError(where, None, message) from None
        return np.array(self._made.encode(text, add_special_tokens=False).ids, dtype=self.dtype)

    def decoder(self) -> Decoder:
        return SubwordDecoder(lambda tokens: self._made.decode(list(tokens), skip_special_tokens=False))
