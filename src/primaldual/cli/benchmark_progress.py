"""How far a comparison is: a bar on a terminal, a line for every fit elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from .main import errors

if TYPE_CHECKING:
    from ..bench.series import Job, Store
    from ..bench.series.records import Record
    from ..bench.series.run import Watch


@contextmanager
def watching(wanted: Sequence[Job], store: Store, left: Sequence[Job], processes: int) -> Iterator[Watch]:
    """What is told of every fit that has ended; the time that is left follows from what fits took so far."""
    from ..bench.series.eta import Pace

    pace, done, to_do = Pace(), 0, dict.fromkeys(left)
    for job in wanted:
        if job not in to_do and (record := store.record(job)) is not None:
            pace.add(job, record)
    whole = {"no_wrap": True, "overflow": "ellipsis"}
    columns = (
        TextColumn("{task.description}", table_column=Column(max_width=40, **whole)),  # type: ignore[arg-type]
        BarColumn(bar_width=8), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=len(left), left="")

        def watch(job: Job, record: Record) -> None:
            nonlocal done
            done += 1
            pace.add(job, record)
            to_do.pop(job, None)
            seconds = pace.seconds(to_do, processes)
            remaining = "" if seconds is None or not to_do else f"{timedelta(seconds=round(seconds))} left"
            said = f"{job.text()}: {_words(record)}"
            if errors.is_terminal:
                bar.update(task, completed=done, description=escape(f"{job.dataset}, {job.method}"), left=remaining)
                if "failure" in record:
                    bar.console.print(f"[yellow]{escape(said)}[/]", highlight=False, soft_wrap=True)
                return
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {done} of {len(left)}: {said}"
            errors.print(f"{line}, {remaining}" if remaining else line, highlight=False, markup=False, soft_wrap=True)

        yield watch


def _words(record: Record) -> str:
    if "failure" in record:
        return str(record["failure"])
    scores = record["scores"]
    score = f"accuracy {scores['accuracy']:.2f} %" if "accuracy" in scores else f"RMSE {scores['rmse']:.4g}"
    return f"{score} in {record['fit_seconds'] + record['predict_seconds']:.1f} s"
