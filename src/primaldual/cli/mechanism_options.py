"""The options of a mechanism, and their values as they are typed, to what the library takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..primal import Fixed, Pattern, Primal, Strided, Window, mechanism

OPTIONS: dict[str, Any] = {
    "beta": Annotated[float | None, typer.Option(help="`bn`: how much of the mean is taken off.")],
    "learnable": Annotated[bool | None, typer.Option("--learnable", help="`bn`: learn β, one per head.")],
    "full": Annotated[bool | None, typer.Option("--full", help="`bn`: divide by the deviation too.")],
    "scales": Annotated[str | None, typer.Option(help="`sh`: one scale per head, such as `1,1,2,2,4,4,8,8`.")],
    "slopes": Annotated[str | None, typer.Option(help="`alibi`: one slope per head, such as `0.5,0.25`.")],
    "how": Annotated[str | None, typer.Option(help="`sh`: `mean`, `max`, `conv` or `kmeans`.")],
    "prefix": Annotated[int | None, typer.Option(help="`sh`, `conv2d`: so many tokens stay as they are.")],
    "size": Annotated[str | None, typer.Option(help="`conv1d`: kernel size, such as `5`; `conv2d`: `3x3`.")],
    "causal": Annotated[bool | None, typer.Option("--causal", help="`conv1d`: look back only.")],
    "channels": Annotated[str | None, typer.Option(help="`conv1d`: `one` kernel for all channels, or `each` its own.")],
    "grid": Annotated[str | None, typer.Option(help="`conv2d`, `sh`: rows x columns of patches, such as `14x14`.")],
    "per": Annotated[str | None, typer.Option(help="`gate`: a gate for each `channel` or `head`.")],
    "sink": Annotated[float | None, typer.Option(help="`sink`: a number in place of one learned for each head.")],
    "bandwidth": Annotated[float | None, typer.Option(help="`gaussian`: of the kernel.")],
    "degree": Annotated[int | None, typer.Option(help="`polynomial`: p of (x·y/√D + c)^p.")],
    "constant": Annotated[float | None, typer.Option(help="`polynomial`: c.")],
    "temperature": Annotated[
        bool | None, typer.Option("--temperature", help="`qk-norm`: learn a factor on the scores, one per head.")
    ],
    "rotary": Annotated[bool | None, typer.Option("--rotary", help="rotary positions on queries and keys.")],
    "pattern": Annotated[
        str | None,
        typer.Option(help="`sparse`: `strided`, `fixed` or `window`; sized: `window:16`, `strided:sqrt`."),
    ],
}
"""Of every mechanism; those that a mechanism does not have are errors where they are given."""

INSTEAD = {"size": "kernel_size"}
"""What an option is called in a command that has one of its name."""

_PATTERNS = {"strided": Strided, "fixed": Fixed, "window": Window}


def with_mechanism_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `settings` is all of `OPTIONS`, which it gets as one dictionary."""
    signature = inspect.signature(command, eval_str=True)
    names = {option: INSTEAD[option] if option in signature.parameters else option for option in OPTIONS}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name == "settings":
            named = inspect.Parameter.KEYWORD_ONLY
            parameters += (
                inspect.Parameter(names[option], named, default=None, annotation=kind)
                for option, kind in OPTIONS.items()
            )
        else:
            parameters.append(parameter)

    def called(**given: Any) -> None:
        command(settings={option: given.pop(name) for option, name in names.items()}, **given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


def mechanism_option(name: str, settings: dict[str, Any]) -> Primal:
    """A mechanism with those of the settings that are not None.

    >>> mechanism_option("sh", {"beta": None, "scales": "1,2"}).training_set.scales
    (1, 2)
    """
    read: dict[str, Callable[[str], Any]] = {
        "scales": scales_option, "slopes": _slopes, "size": _size, "grid": lambda text: _pair("--grid", text),
        "pattern": _pattern,
    }  # fmt: skip
    chosen = {key: value for key, value in settings.items() if value is not None}
    return mechanism(name, **{key: read[key](value) if key in read else value for key, value in chosen.items()})


def scales_option(text: str | None) -> tuple[int, ...] | None:
    """One scale per head.

    >>> scales_option("1,1,2,2")
    (1, 1, 2, 2)
    """
    return None if text is None else _integers("--scales", text, ",", "such as 1,1,2,2")


def _slopes(text: str) -> tuple[float, ...]:
    """One slope per head.

    >>> _slopes("0.5,0.25")
    (0.5, 0.25)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--slopes takes numbers, such as 0.5,0.25; got {text!r}") from None


def _size(text: str) -> int | tuple[int, int]:
    """A kernel size: one number, or two.

    >>> _size("5"), _size("3x3")
    (5, (3, 3))
    """
    if "x" in text.lower():
        return _pair("--size", text)
    return _integers("--size", text, "x", "such as 5 or 3x3")[0]


def _pattern(text: str) -> str | Pattern:
    """A pattern by name, with its size after a colon; "sqrt" is round(√N), N the padded, pooled length.

    >>> _pattern("window:16"), _pattern("strided:sqrt")
    (Window(radius=16), Strided(stride=None))
    """
    if ":" not in text:
        return text
    name, _, size = text.partition(":")
    if name not in _PATTERNS:
        raise ValueError(f"--pattern must be one of {', '.join(_PATTERNS)}, as in window:16; got {text!r}")
    if size == "sqrt":
        return _PATTERNS[name](None)
    return _PATTERNS[name](
        *_integers("--pattern", size, ",", "sizes, such as window:16 or fixed:16,2, or strided:sqrt")
    )


def _pair(option: str, text: str) -> tuple[int, int]:
    """Rows and columns.

    >>> _pair("--grid", "14x14")
    (14, 14)
    """
    pair = _integers(option, text, "x", "rows x columns, such as 14x14")
    if len(pair) != 2:
        raise ValueError(f"{option} takes rows x columns, such as 14x14; got {text!r}")
    return pair[0], pair[1]


def _integers(option: str, text: str, separator: str, expected: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.lower().split(separator))
    except ValueError:
        raise ValueError(f"{option} takes integers, {expected}; got {text!r}") from None
