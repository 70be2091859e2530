"""What `diagnose` found: rows, a table, a dataframe, a plot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.files import replacing
from ..base.packages import needed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table
    from rich.text import Text

EXTRA = '"primaldual[demo]"'
"""What brings pandas and matplotlib."""


class Numbers(NamedTuple):
    """What is measured of a head; `diagnose` says what each is."""

    log_C: float
    support_share: float
    bound_share: float
    effective_rank: float
    rank: float
    points: float
    condition: float


class HeadRow(NamedTuple):
    """One head of one call of a layer: means over the sequences of the batch.

    layer: the module's name in the model; call: 0, or which call of a module that is used more than once.
    scale: the pooling of the head's keys.
    sequences: how many the means are over.
    top_tokens: positions of the largest |α| in the first sequence, in descending order; of a pooled point the first
        token. A learned or a zero key stands after the tokens.
    note: what else is to know, or why there are no numbers.
    std: the standard deviations over the sequences, of the condition number that of its log10.
    """

    layer: str
    call: int
    head: int
    scale: int
    log_C: float
    support_share: float
    bound_share: float
    effective_rank: float
    rank: float
    points: float
    condition: float
    sequences: int
    top_tokens: tuple[int, ...]
    note: str
    std: Numbers


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The regressions of a model's heads, in the order of the forward pass. Print it for the table."""

    rows: tuple[HeadRow, ...]
    epsilon: float

    def layers(self) -> dict[str, tuple[HeadRow, ...]]:
        """The rows of each layer; of a layer that is used more than once, those of each call."""
        repeated = {row.layer for row in self.rows if row.call}
        grouped: dict[str, tuple[HeadRow, ...]] = {}
        for row in self.rows:
            name = f"{row.layer}, call {row.call}" if row.layer in repeated else row.layer
            grouped[name] = (*grouped.get(name, ()), row)
        return grouped

    def table(self) -> Table:
        """For a terminal: means ± standard deviations over the sequences of the batch."""
        from rich import box
        from rich.table import Table

        table = Table(
            title=f"The regression behind every head, ε = {self.epsilon:g}", title_style="italic",
            box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=self._notes(), caption_justify="left",
        )  # fmt: skip
        table.add_column("layer", style="bold cyan", no_wrap=True)
        headings = ("head", "scale", "log C", "support", "at bound", "eff. rank", "rank", "points", "condition")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("largest |α| at", no_wrap=True)
        for name, rows in self.layers().items():
            for row in rows:
                table.add_row(
                    name if row is rows[0] else "", str(row.head), str(row.scale),
                    _number(row.log_C, row.std.log_C, ".1f"),
                    _number(row.support_share, row.std.support_share, ".0%"),
                    _number(row.bound_share, row.std.bound_share, ".1%"),
                    _number(row.effective_rank, row.std.effective_rank, ".1f"),
                    _number(row.rank, 0.0, ".3g"), _number(row.points, 0.0, ".3g"),
                    _number(row.condition, 0.0, ".0e"), ", ".join(map(str, row.top_tokens)) or "–",
                    end_section=row is rows[-1],
                )  # fmt: skip
        return table

    def to_dataframe(self) -> Any:
        """A pandas DataFrame, one line per head; standard deviations are columns that end in _std."""
        pandas = needed("pandas", "pandas", "to_dataframe()", EXTRA)
        lines = []
        for row in self.rows:
            line = row._asdict()
            std = line.pop("std")
            lines.append(line | {f"{name}_std": value for name, value in std._asdict().items()})
        return pandas.DataFrame(lines)

    def plot(self, path: str | Path | None = None) -> Figure:
        """A figure with a line of panels for each layer, and a bar for each head; saved where a path is given."""
        needed("matplotlib", "matplotlib", "plot()", EXTRA)
        from .diagnose_plot import draw

        drawing = draw(self)
        if path is not None:
            with replacing(Path(path)) as scratch:
                drawing.savefig(scratch, format=Path(path).suffix.removeprefix(".") or "png", dpi=150)
        return drawing

    def _notes(self) -> Text | None:
        """Each note of a layer once, with the heads where it is not on all."""
        from rich.text import Text

        lines = []
        for name, rows in self.layers().items():
            for note in dict.fromkeys(row.note for row in rows if row.note):
                heads = [str(row.head) for row in rows if row.note == note]
                which = "" if len(heads) == len(rows) else f", head {', '.join(heads)}"
                lines.append(f"{name}{which}: {note}")
        return Text("\n".join(lines)) if lines else None

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=200, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")

    def __repr__(self) -> str:
        return f"Diagnosis({len(self.rows)} heads of {len(self.layers())} layers, epsilon={self.epsilon:g})"


def _number(mean: float, std: float, form: str) -> str:
    if math.isnan(mean):
        return "–"
    if math.isinf(mean):
        return "∞"
    return f"{mean:{form}}" + (f" ± {std:{form}}" if std > 0 else "")
