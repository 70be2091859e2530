"""Watching a training: a bar in the terminal, lines elsewhere, a CSV file, curves in TensorBoard."""

from __future__ import annotations

import csv
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from ..base.files import appended, write_text
from ..base.packages import needed
from .progress import Progress, Watch


@contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Watch]:
    """A bar with the time that is left on a terminal, and lines elsewhere; the numbers are means over the members."""
    if not console.is_terminal:
        yield log_lines(lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True), title)
        return
    whole = {"no_wrap": True, "overflow": "ellipsis"}
    columns = (
        TextColumn("{task.description}", table_column=Column(max_width=22, **whole)),  # type: ignore[arg-type]
        BarColumn(bar_width=10), MofNCompleteColumn(), TextColumn("{task.fields[unit]}s"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[text]}", table_column=Column(**whole)),  # type: ignore[arg-type]
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
            if text := _means(progress):
                bars.update(task, text=text)
            for message in progress.messages:
                bars.console.print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)

        yield watch


LINES, SECONDS = 10, 60.0
"""About so many lines tell of a training, and more where nothing was said for so long."""


def log_lines(write: Callable[[str], None], title: str) -> Watch:
    """Lines with time, epoch, loss, metrics and what is left: at the first evaluation, on the way, and at the last."""
    began: float | None = None
    said: tuple[float, float] | None = None  # how far it was, and when
    start = 0.0

    def watch(progress: Progress) -> None:
        nonlocal began, said, start
        now = time.monotonic()
        if began is None:
            began, start = now, progress.done
        for message in progress.messages:
            write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}: {message}")
        due = said is None or progress.done >= progress.total or progress.done - said[0] >= progress.total / LINES
        if not ((due and progress.values) or (said is not None and now - said[1] >= SECONDS)):
            return
        said = progress.done, now
        words = [f"{progress.unit} {progress.done:.4g} of {progress.total}", _means(progress)]
        if start < progress.done < progress.total:
            left = (now - began) / (progress.done - start) * (progress.total - progress.done)
            words.append(f"{timedelta(seconds=round(left))} left")
        write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}: {', '.join(word for word in words if word)}")

    return watch


def _means(progress: Progress) -> str:
    return ", ".join(f"{part} {fmean(values):.4g}" for part, values in progress.values.items() if values)


def csv_log(path: str | Path) -> Watch:
    """A line per evaluation and seed in a CSV file: epoch or step, seed, seconds, loss, and the metric on every part.

    A training that goes on from a checkpoint goes on in the file, too: lines of what is done again are taken out.
    """
    file, began = Path(path), time.monotonic()
    writer: Callable[[Sequence[Any]], Any] | None = None

    def watch(progress: Progress) -> None:
        nonlocal writer
        if not progress.values:
            return
        names = [progress.unit, "seed", "seconds", *progress.values]
        if writer is None:
            write_text(file, _lines_before(file, names, progress))
            stream = appended(file)
            weakref.finalize(watch, stream.close)
            writer = csv.writer(stream, lineterminator="\n").writerow
        seconds = round(time.monotonic() - began, 3)
        for i, seed in enumerate(progress.seeds):
            writer([f"{progress.done:g}", seed, seconds, *(values[i] for values in progress.values.values())])

    return watch


def _lines_before(file: Path, names: list[str], progress: Progress) -> str:
    """The heading, and of a file that is there what comes before this point of these seeds."""
    kept = [",".join(names)]
    if file.is_file():
        heading, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
        if heading != kept[0]:
            raise ValueError(f"{file} has other columns, {heading!r}; choose another file, or remove it")
        for line in lines:
            at, seed, *rest = line.split(",")
            if len(rest) == len(names) - 2 and (int(seed) not in progress.seeds or float(at) < progress.done):
                kept.append(line)
    return "\n".join(kept) + "\n"


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
