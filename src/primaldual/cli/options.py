"""Option values as they are typed, to what `mechanism` takes."""

from __future__ import annotations

from ..primal import Fixed, Pattern, Strided, Window

_PATTERNS = {"strided": Strided, "fixed": Fixed, "window": Window}


def scales_option(text: str | None) -> tuple[int, ...] | None:
    """One scale per head.

    >>> scales_option("1,1,2,2")
    (1, 1, 2, 2)
    """
    return None if text is None else _integers("--scales", text, ",", "such as 1,1,2,2")


def pair_option(option: str, text: str | None) -> tuple[int, int] | None:
    """Rows and columns.

    >>> pair_option("--grid", "14x14")
    (14, 14)
    """
    if text is None:
        return None
    pair = _integers(option, text, "x", "rows x columns, such as 14x14")
    if len(pair) != 2:
        raise ValueError(f"{option} takes rows x columns, such as 14x14; got {text!r}")
    return pair[0], pair[1]


def size_option(text: str | None) -> int | tuple[int, int] | None:
    """A kernel size: one number, or two.

    >>> size_option("5"), size_option("3x3")
    (5, (3, 3))
    """
    if text is None or "x" in text.lower():
        return pair_option("--size", text)
    return _integers("--size", text, "x", "such as 5 or 3x3")[0]


def pattern_option(text: str | None) -> str | Pattern | None:
    """A pattern by name, with its size after a colon.

    >>> pattern_option("window:16")
    Window(radius=16)
    """
    if text is None or ":" not in text:
        return text
    name, _, size = text.partition(":")
    if name not in _PATTERNS:
        raise ValueError(f"--pattern must be one of {', '.join(_PATTERNS)}, as in window:16; got {text!r}")
    return _PATTERNS[name](*_integers("--pattern", size, ",", "sizes, such as window:16 or fixed:16,2"))


def _integers(option: str, text: str, separator: str, expected: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.lower().split(separator))
    except ValueError:
        raise ValueError(f"{option} takes integers, {expected}; got {text!r}") from None
