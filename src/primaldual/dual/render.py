"""A derivation as sections of sentences and formulas, and the three ways to write it down."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Line(NamedTuple):
    """A sentence or a formula, in plain text and in LaTeX."""

    text: str
    latex: str
    is_math: bool


class Section(NamedTuple):
    """A step of the derivation."""

    title: str
    lines: list[Line]


def say(text: str, latex: str | None = None) -> Line:
    return Line(text, text if latex is None else latex, False)


def formula(text: str, latex: str) -> Line:
    return Line(text, latex, True)


def _as_text(sections: list[Section]) -> str:
    blocks = []
    for number, (title, lines) in enumerate(sections, 1):
        body = "\n".join(f"      {line.text}" if line.is_math else f"   {line.text}" for line in lines)
        blocks.append(f"{number}. {title}\n{body}")
    return "\n\n".join(blocks) + "\n"


def _as_markdown(sections: list[Section]) -> str:
    blocks = []
    for title, lines in sections:
        body = "\n\n".join(
            f"$$\n{line.latex}\n$$" if line.is_math else line.latex.replace(r"\_", "_") for line in lines
        )
        blocks.append(f"## {title}\n\n{body}")
    return "\n\n".join(blocks) + "\n"


def _as_latex(sections: list[Section]) -> str:
    blocks = []
    for title, lines in sections:
        body = "\n".join(f"\\[\n  {line.latex}\n\\]" if line.is_math else line.latex for line in lines)
        blocks.append(f"\\subsection*{{{title}}}\n{body}")
    return "\n\n".join(blocks) + "\n"


RENDERERS: dict[str, Callable[[list[Section]], str]] = {
    "text": _as_text,
    "markdown": _as_markdown,
    "latex": _as_latex,
}
