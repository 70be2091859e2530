"""Tables of a comparison in a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.terminal import side_by_side, titled
from .main import _escape, console

if TYPE_CHECKING:
    from ..paper.render import Grid


def show(grids: Sequence[Grid], notes: Sequence[str], legend: Sequence[str]) -> None:
    """A table in as many parts as the width asks for, and what stands below them all."""
    for grid in grids:
        columns = [[_escape(text) for text in column] for column in zip(grid.header, *grid.rows, strict=True)]
        spaced = [[f"{text} " for text in column] for column in columns]  # beside its own space each has a rule's
        for part in side_by_side(spaced, labels=2, width=console.width):
            shown = titled(grid.title)
            for i in part:
                shown.add_column(columns[i][0], justify="left" if i == 0 else "right", no_wrap=True)
            for row in grid.rows:
                shown.add_row(*(_escape(row[i]) for i in part))
            console.print(shown)
    for note in notes:
        console.print(f"[yellow]note:[/] {_escape(note)}", highlight=False)
    for line in legend:
        console.print(_escape(line), style="dim", highlight=False)
