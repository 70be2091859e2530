"""What the demo shows in the terminal: a progress bar, and its results as a table."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .results import MEGA, Results

_HEADINGS = ("accuracy, %", "parameters", "attention MFLOPs", "CPU s\nper run", "distance\nof heads")


class _Remaining(ProgressColumn):
    """Time left if the remaining runs take as long as those so far; runs end in bursts, one per worker."""

    def render(self, task: Task) -> Text:
        if not task.completed or task.elapsed is None or task.remaining is None:
            return Text("ETA –:––")
        minutes, seconds = divmod(round(task.elapsed / task.completed * task.remaining), 60)
        return Text(f"ETA {minutes}:{seconds:02d}")


def progress_bar(console: Console) -> Progress:
    """A bar that counts runs."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn(),
        _Remaining(),
    )  # fmt: skip
    return Progress(*columns, console=console)


def summary_table(results: Results) -> Table:
    """One line per mechanism."""
    seeds = len(results.of("softmax"))
    table = Table(title=f"BasicMotions, last epoch, {seeds} seed{'' if seeds == 1 else 's'}", title_style="italic")
    table.add_column("mechanism", style="bold cyan", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for name in results.expansions:
        before, after = (results.flops(name, rewritten) / MEGA for rewritten in (False, True))
        table.add_row(
            name,
            results.accuracy(name).text(),
            f"{results.of(name)[0].parameters:,}",
            f"{before:.2f} → {after:.2f}",
            f"{results.train_seconds(name).mean:.2f}",
            f"{results.head_distance(name).mean:.2f}",
        )
    return table
