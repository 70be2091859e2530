"""Grids of text as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv as csv_module
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Grid(NamedTuple):
    """A title, a header and rows; the first two columns are labels."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(grids: Sequence[Grid], notes: Sequence[str], legend: Sequence[str]) -> str:
    """A heading and a table each; then lists."""
    lines = []
    for level, grid in enumerate(grids, 1):
        rules = [":--" if i < 2 else "--:" for i in range(len(grid.header))]
        lines += [f"{'#' * min(level, 2)} {grid.title}", ""]
        lines += [f"| {' | '.join(row)} |" for row in (grid.header, rules, *grid.rows)]
        lines.append("")
    if notes:
        lines += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    return "\n".join([*lines, *(f"- {line}" for line in legend)]) + "\n"


def csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """A line per row; what is not known is empty."""
    stream = io.StringIO()
    writer = csv_module.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{x:.6g}" if isinstance(x, float) else x for name, x in row.items()})
    return stream.getvalue()


_LATEX = {
    "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--", "−": "$-$", "β": r"$\beta$", "_": r"\_", "%": r"\%",
    "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def latex(grids: Sequence[Grid], notes: Sequence[str], legend: Sequence[str]) -> str:
    """A tabular each, with the rules of booktabs; then paragraphs."""
    lines = []
    for grid in grids:
        lines += [rf"% {grid.title}", rf"\begin{{tabular}}{{ll{'r' * (len(grid.header) - 2)}}}", r"\toprule"]
        lines += [_latex_row(grid.header), r"\midrule"]
        for i, row in enumerate(grid.rows):
            if i and row[0]:
                lines.append(r"\addlinespace")
            lines.append(_latex_row(row))
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([*lines, *(rf"\par{{\footnotesize {_escape(line)}}}" for line in (*notes, *legend))]) + "\n"


def _latex_row(row: Sequence[str]) -> str:
    return " & ".join(map(_escape, row)) + r" \\"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
