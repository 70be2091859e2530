"""Watching a training: a bar in the terminal, curves in TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ..base.packages import needed
from .progress import Progress, Watch


@contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Watch]:
    """A bar with the time that is left; the numbers are means over the members."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}s"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[text]}"),
    )  # fmt: skip
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(escape(title), total=None, text="", unit="epoch")
        begun = False

        def watch(progress: Progress) -> None:
            nonlocal begun
            if not begun:  # a resumed run begins in the middle: its speed is measured from there
                bars.reset(task, total=progress.total, completed=int(progress.done), text="", unit=progress.unit)
                begun = True
            bars.update(task, completed=progress.done)
            if text := ", ".join(f"{part} {fmean(values):.4g}" for part, values in progress.values.items() if values):
                bars.update(task, text=text)
            for message in progress.messages:
                bars.console.print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)

        yield watch


@contextmanager
def tensorboard(folder: str | Path) -> Iterator[Watch]:
    """Curves of every member: loss, and the metric on each part."""
    module = needed("torch.utils.tensorboard", "tensorboard", "TensorBoard")
    writer = module.SummaryWriter(str(folder))
    try:

        def watch(progress: Progress) -> None:
            for part, values in progress.values.items():
                for seed, value in zip(progress.seeds, values, strict=True):
                    writer.add_scalar(f"{part}/seed {seed}", value, progress.done)

        yield watch
    finally:
        writer.close()
