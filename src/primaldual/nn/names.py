"""How a layer names its mechanism when it is printed."""

from __future__ import annotations

from dataclasses import fields

from ..primal import Primal, mechanism, mechanisms


def name_of(primal: Primal) -> str:
    """A mechanism's name where it has one, else the parts in which it differs from softmax attention.

    >>> from primaldual.primal import Recenter
    >>> name_of(mechanism("bn+sh")), name_of(Primal(inputs=(Recenter(0.5),)))
    ("'bn+sh'", 'Primal(inputs=(Recenter(beta=0.5, learnable=False),))')
    """
    for name in mechanisms():
        if mechanism(name) == primal:
            return repr(name)
    plain = Primal()
    own = [f.name for f in fields(primal) if getattr(primal, f.name) != getattr(plain, f.name)]
    return f"Primal({', '.join(f'{name}={getattr(primal, name)!r}' for name in own)})"
