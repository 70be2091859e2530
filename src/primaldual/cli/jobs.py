"""From the jobs that are wanted to a report: the way that `primaldual reproduce` and `primaldual sweep` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..base.files import write_text
from ..base.terminal import side_by_side, titled
from ..base.threads import on_threads
from . import options
from .main import _escape, _fail, console, errors

if TYPE_CHECKING:
    from ..paper import Engine, Failure, Job
    from ..paper.render import Grid
    from ..training import Record, Watch


@contextmanager
def one_line_errors(status: int) -> Iterator[None]:
    """What goes wrong is said in one line, with this exit status; 130 where it was stopped."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise _fail(error, status) from None
    except KeyboardInterrupt:
        raise _fail("stopped; the same command goes on from the last checkpoint", 130) from None


def train(
    wanted: Sequence[Job], output: Path, engine: Engine, device: str | None, threads: int, data_dir: Path | None,
    offline: bool, *, dry_run: bool, only_report: bool,
) -> list[Failure]:  # fmt: skip
    """Train what is not recorded in the output folder, and give what could not be; exits after a dry run."""
    from ..paper import Place
    from ..training import Store

    with one_line_errors(2):
        left = _not_recorded(wanted, Store(output).records())
        place = Place(output, data_dir, offline, options.device_option(device), _progress)
    if dry_run:
        for job, seeds in left.items():
            length = f"{job.recipe.end} {job.recipe.unit}s"
            say(f"{job.dataset}, {job.mechanism}: seeds {', '.join(map(str, seeds))}, {length}")
    if not only_report:
        say(f"{len(wanted) - len(left)} of {len(wanted)} runs are recorded, {len(left)} to go")
    if dry_run:
        _show_missing(dict.fromkeys(job.dataset for job in left), data_dir)
        raise typer.Exit
    with one_line_errors(1), on_threads(threads):
        return [] if only_report else engine(list(left), place)


def _not_recorded(wanted: Sequence[Job], records: list[Record]) -> dict[Job, list[int]]:
    """Jobs with seeds that are not recorded, and those seeds; a ValueError says which model there cannot be."""
    from ..paper import recorded

    for job in wanted:
        job.config()
    left = {job: [s for s in job.seeds if s not in found] for job, found in recorded(wanted, records).items()}
    return {job: seeds for job, seeds in left.items() if seeds}


def _show_missing(names: Iterable[str], data_dir: Path | None) -> None:
    """The sets that are not here; nothing is downloaded or generated for it."""
    from ..paper.families import family

    for name in names:
        if message := family(name).missing(name, data_dir):
            console.print(f"[yellow]missing set {name}:[/] {_escape(message)}", highlight=False, soft_wrap=True)


def _progress(job: Job) -> AbstractContextManager[Watch]:
    """The bar of a job."""
    from ..training import progress_bar

    return progress_bar(errors, f"{job.dataset}, {job.mechanism}")


def write_texts(folder: Path, name: str, texts: dict[str, str]) -> list[Path]:
    """A file for every suffix."""
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in texts}
    for suffix, text in texts.items():
        write_text(paths[suffix], text)
    return list(paths.values())


def show(grids: Sequence[Grid], words: Sequence[str], notes: Sequence[str], legend: Sequence[str]) -> None:
    """Tables, of which the paper's rows are dim, and what stands below them."""
    for grid in grids:
        columns = [[_escape(text) for text in column] for column in zip(grid.header, *grid.rows, strict=True)]
        for part in side_by_side(columns, labels=2, width=console.width):
            shown = titled(grid.title)
            for i in part:
                shown.add_column(_escape(grid.header[i]), justify="left" if i < 2 else "right", no_wrap=True)
            for row in grid.rows:
                if row[0]:
                    shown.add_section()
                shown.add_row(*(_escape(row[i]) for i in part), style="dim" if row[1] == "paper" else "")
            console.print(shown)
    for line in words:
        say(line)
    for note in notes:
        console.print(f"[yellow]note:[/] {_escape(note)}", highlight=False, soft_wrap=True)
    for line in legend:
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def end(written: Sequence[Path], failures: Sequence[Failure], measured: bool) -> None:
    """Say what was written; an exit where a job failed, or where nothing is measured."""
    say(f"Written: {', '.join(map(str, written))}")
    if any(failure.mechanism for failure in failures) or not measured:
        raise typer.Exit(1)


def say(text: str) -> None:
    """A line, as it is."""
    console.print(_escape(text), highlight=False, soft_wrap=True)
