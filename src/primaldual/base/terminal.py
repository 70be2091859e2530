"""The look of tables in a terminal."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table


def titled(title: str) -> Table:
    """An empty table under a title."""
    return Table(title=escape(title), title_style="italic", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
