"""What every stated thing has in common: frozen, hashable, comparable, JSON both ways."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, Self

from ..base.suggestions import did_you_mean


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
        """The inverse of `to_dict`; unknown kinds and fields are errors that name what exists."""
        if not isinstance(data, dict) or "kind" not in data:
            raise ValueError(f"expected a mapping with a 'kind', as to_dict() writes it; got {data!r}")
        kind = data["kind"]
        if kind not in Spec._kinds:
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
            raise ValueError(f"{kind} has no field {sorted(unknown)}; it has {sorted(known)}")
        needed = {f.name for f in fields(target) if f.default is MISSING and f.default_factory is MISSING}
        if missing := needed - set(data):
            raise ValueError(f"{kind} needs the field {', '.join(sorted(missing))}; got {sorted(set(data) - {'kind'})}")
        return target(**{name: _decode(value) for name, value in data.items() if name != "kind"})

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


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return Spec.from_dict(value)
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


def operand(x: str) -> str:
    """An expression as an operand: in brackets when it is a sum."""
    return f"({x})" if any(sign in x for sign in "−+-") else x


def check_count(owner: str, name: str, value: Any, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}: {name} must be an integer of at least {least}, got {value!r}")


def check_choice(owner: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(choices)}; got {value!r}")


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, numpy's included."""
    return isinstance(value, Real) and not isinstance(value, bool)
