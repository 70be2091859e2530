"""What the demo shows in the terminal: a progress bar, and its results as a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..training import Progress as Reached
from ..training import Watch
from .results import MEGA, Results

HEADINGS = ("accuracy, %", "parameters", "attention MFLOPs", "CPU s\nper seed", "distance\nof heads")


class Bar:
    """A bar that counts models, and parts of them as their epochs go by."""

    def __init__(self, bars: Progress, total: int) -> None:
        self._bars, self._task, self._done = bars, bars.add_task("training", total=total), 0

    def watch(self, name: str, members: int) -> Watch:
        """What is to be called while so many models of a mechanism train together."""
        done, self._done = self._done, self._done + members
        self._bars.update(self._task, description=f"training {name}")

        def watch(reached: Reached) -> None:
            self._bars.update(self._task, completed=done + members * reached.done / reached.total)

        return watch

    def end(self) -> None:
        """Full, however many there are."""
        self._bars.update(self._task, description="trained", total=self._done, completed=self._done)


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Bar]:
    """A bar for so many models, with the time that is left if all of them are trained."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("models"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        bar = Bar(bars, total)
        yield bar
        bar.end()


def summary_table(results: Results) -> Table:
    """One line per mechanism."""
    seeds = len(results.of("softmax"))
    table = Table(title=f"BasicMotions, last epoch, {seeds} seed{'' if seeds == 1 else 's'}", title_style="italic")
    table.add_column("mechanism", style="bold cyan", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name in results.expansions:
        before, after = (results.flops(name, rewritten) / MEGA for rewritten in (False, True))
        table.add_row(
            name,
            results.accuracy(name).text(),
            f"{results.of(name)[0].record.parameters:,}",
            f"{before:.2f} → {after:.2f}",
            f"{results.cpu_seconds(name):.2f}",
            f"{results.head_distance(name).mean:.2f}",
        )
    return table
