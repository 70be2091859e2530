"""Watching a training: a bar in the terminal, curves in TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..base.packages import needed
from .loop import Report, Watch


@contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Watch]:
    """A bar with the time that is left; the numbers are means over the members."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[text]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(escape(title), total=None, text="")
        begun = False

        def watch(report: Report) -> None:
            nonlocal begun
            if not begun:  # a resumed run begins in the middle: its speed is measured from there
                bars.reset(task, total=report.epochs, completed=int(report.epoch))
                begun = True
            bars.update(task, completed=report.epoch)
            if text := ", ".join(f"{part} {fmean(values):.4g}" for part, values in report.values.items() if values):
                bars.update(task, text=text)
            for message in report.messages:
                bars.console.print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)

        yield watch


@contextmanager
def tensorboard(folder: str | Path) -> Iterator[Watch]:
    """Curves of every member: loss, and the metric on each part."""
    module = needed("torch.utils.tensorboard", "tensorboard", "TensorBoard")
    writer = module.SummaryWriter(str(folder))
    try:

        def watch(report: Report) -> None:
            for part, values in report.values.items():
                for seed, value in zip(report.seeds, values, strict=True):
                    writer.add_scalar(f"{part}/seed {seed}", value, report.epoch)

        yield watch
    finally:
        writer.close()
