"""The names that were probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def did_you_mean(given: object, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """The end of a sentence about an unknown name: the nearest known ones where there are any.

    Case, the signs between words and the order of words are not looked at; `cutoff` is how near is near (1: equal).

    >>> did_you_mean("BN_SH", ["bn", "sh", "bn+sh"]), did_you_mean("betta", ["beta", "full"]), did_you_mean("x", ["y"])
    ("; did you mean 'bn+sh'?", "; did you mean 'beta'?", '.')
    """
    words, known = _words(str(given)), tuple(known)
    near = [name for name in known if sorted(_words(name)) == sorted(words)]
    if not near:
        plain = {" ".join(_words(name)): name for name in known}
        near = [plain[one] for one in difflib.get_close_matches(" ".join(words), plain, n=most, cutoff=cutoff)]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())
