"""What every stated thing has in common: frozen, hashable, comparable, JSON both ways."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, Self

from ..base.suggestions import did_you_mean

DEEPEST = 64
"""Levels of specs inside one another that are read; the library's own have four."""

LARGEST = 1 << 63
"""Integers beyond it are no sizes, and fit into no tensor."""

LONGEST = 1 << 16
"""The most taps of a convolution, and the most features that are drawn; more are refused before they are allocated."""


class UnknownKindError(ValueError):
    """A serialised spec names a class that has not been defined in this process."""


@dataclass(frozen=True)
class Spec:
    """A frozen value that says what is computed, never how.

    Subclasses are frozen dataclasses whose fields are numbers, strings, tuples of those, or other specs.
    Defining a subclass registers it, so that `from_dict` finds it again by name.
    """

    _kinds: ClassVar[dict[str, type[Spec]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Spec._kinds[cls.kind()] = cls
        # one repr for all, which torch.compile can trace; dataclass leaves a method alone that the class has
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Spec.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)]
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def kind(cls) -> str:
        """The name under which this class is serialised: bare for this library's own, qualified for yours."""
        if cls.__module__.startswith("primaldual."):
            return cls.__name__
        return f"{cls.__module__}:{cls.__qualname__}"

    def to_dict(self) -> dict[str, Any]:
        """This value as plain JSON types.

        >>> from primaldual.primal import Recenter
        >>> Recenter(0.5).to_dict()
        {'kind': 'Recenter', 'beta': 0.5, 'learnable': False}
        """
        said = (f for f in fields(self) if not (f.metadata.get("added") and getattr(self, f.name) == f.default))
        return {"kind": self.kind()} | {f.name: _encode(getattr(self, f.name)) for f in said}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; whatever no such value can be is a ValueError, which names what exists."""
        return cls._read(data, DEEPEST)

    @classmethod
    def _read(cls, data: dict[str, Any], levels: int) -> Self:
        if not levels:
            raise ValueError(f"specs lie more than {DEEPEST} levels deep in one another")
        if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
            raise ValueError(f"expected a mapping with a 'kind', as to_dict() writes it; got {_short(data)}")
        kind = data["kind"]
        if kind not in Spec._kinds:
            kind = kind[:80]
            nearest = did_you_mean(kind, Spec._kinds, most=3)
            raise UnknownKindError(
                f"no class {kind!r} is defined here{nearest} Import the module that defines it first"
            )
        target = Spec._kinds[kind]
        if not issubclass(target, cls):
            raise ValueError(f"expected a {cls.__name__}, got a serialised {kind}")
        known = {f.name for f in fields(target)}
        unknown = set(data) - known - {"kind"}
        if unknown:
            raise ValueError(f"{kind} has no field {sorted(map(str, unknown))}; it has {sorted(known)}")
        needed = {f.name for f in fields(target) if f.default is MISSING and f.default_factory is MISSING}
        if missing := needed - set(data):
            raise ValueError(f"{kind} needs the field {', '.join(sorted(missing))}; got {sorted(set(data) - {'kind'})}")
        flags = {field.name for field in fields(target) if field.type in ("bool", bool)}
        for name in flags & set(data):
            check_flag(kind, name, data[name])
        given = {name: _decode(value, levels - 1) for name, value in data.items() if name != "kind"}
        try:
            return target(**given)
        except (TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
            raise ValueError(f"there is no such {kind}: {error}") from None

    def text(self, x: str = "x") -> str:
        """This part of the layer at the point `x`, in one line; the class's name unless a subclass says better."""
        return f"{type(self).__name__}({x})"

    def latex(self, x: str = "x") -> str:
        """The same for LaTeX."""
        return rf"\mathrm{{{type(self).__name__}}}({x})"

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        """Sentences for the derivation, beside the formula: what its letters mean, how far it is the paper's."""
        return ()


def added(default: Any) -> Any:
    """A field that a class has had only since values of it were recorded.

    At its default `to_dict` leaves it out, so that what was recorded before is found again by its key.
    """
    return field(default=default, metadata={"added": True})


def _encode(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any, levels: int) -> Any:
    if isinstance(value, dict):
        return Spec._read(value, levels)
    if isinstance(value, list):
        if not levels:
            raise ValueError(f"lists lie more than {DEEPEST} levels deep in one another")
        return tuple(_decode(item, levels - 1) for item in value)
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise ValueError(f"a number of {value.bit_length()} bits is too large")
    return value


def _short(value: Any) -> str:
    """Of what may be very long, or very deep."""
    return f"a {type(value).__name__}" if isinstance(value, dict | list) else f"{value!r}"[:80]


def operand(x: str) -> str:
    """An expression as an operand: in brackets when it is a sum."""
    return f"({x})" if any(sign in x for sign in "−+-") else x


def check_count(owner: str, name: str, value: Any, least: int = 1, most: int = LARGEST) -> None:
    """Raise unless `value` is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}: {name} must be an integer of at least {least}, got {value!r}")
    if value > most:
        raise ValueError(f"{owner}: {name} must be at most {most:,}, got {value:,}")


def check_flag(owner: str, name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {name} must be True or False, got {value!r}")


def check_choice(owner: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(choices)}; got {value!r}")


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, numpy's included."""
    return isinstance(value, Real) and not isinstance(value, bool)
