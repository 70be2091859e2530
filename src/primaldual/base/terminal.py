"""The look of tables in a terminal, of any width and any encoding."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich import box
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table
from rich.text import Text


def titled(title: str) -> Table:
    """An empty table under a title."""
    return Table(title=escape(title), title_style="italic", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def side_by_side(columns: Sequence[Sequence[str]], labels: int, width: int) -> Iterator[list[int]]:
    """Which columns fit into a width together, part by part; the first ones, the labels, stand in every part.

    Args:
        columns: the texts of every column, its heading among them, in markup.
        labels: how many are labels.
        width: in letters; a column that is wider alone is a part all the same.

    >>> list(side_by_side([["set"], ["bn"], ["sh"], ["bn+sh"]], labels=1, width=12))
    [[0, 1, 2], [0, 3]]
    """
    wide = [max(cell_len(Text.from_markup(text).plain) for text in column) + 1 for column in columns]
    first = list(range(labels))
    free = width - 2 - sum(wide[:labels])
    part, left = list[int](), free
    for i in range(labels, len(columns)):
        if part and wide[i] > left:
            yield first + part
            part, left = [], free
        part.append(i)
        left -= wide[i]
    yield first + part


def replace_unwritable(*streams: TextIO) -> None:
    """What a stream's encoding has no sign for is written as "?"; the process's own streams unless others are given."""
    for stream in streams or (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="replace")
