"""From the runs that are wanted to a report: the way that `primaldual reproduce` and `primaldual sweep` share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Table

from .main import _escape, _fail, console
from .options import on_threads

if TYPE_CHECKING:
    from ..paper import Engine, Failure, Place, Run
    from ..paper.render import Grid
    from ..training import Record, Watch


@contextmanager
def asking() -> Iterator[None]:
    """What is wrong with the options is said in one line; exit status 2."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise _fail(error, 2) from None


@contextmanager
def working() -> Iterator[None]:
    """What goes wrong in a run is said in one line; exit status 1, or 130 where it was stopped."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise _fail(error, 1) from None
    except KeyboardInterrupt:
        raise _fail("stopped; the same command goes on from the last checkpoint", 130) from None


def to_go(wanted: Sequence[Run], records: list[Record]) -> dict[Run, list[int]]:
    """Runs with seeds that are not recorded, and those seeds; a ValueError says which run there cannot be."""
    for run in wanted:
        run.config()
    found = {run: run.find(records) for run in wanted}
    left = {run: [seed for seed in run.seeds if seed not in recorded] for run, recorded in found.items()}
    return {run: seeds for run, seeds in left.items() if seeds}


def show_plan(wanted: Sequence[Run], left: dict[Run, list[int]], data_dir: Path | None) -> None:
    """What would run; nothing is downloaded for it."""
    from ..data import DataError, load

    for run, seeds in left.items():
        say(f"{run.dataset}, {run.mechanism}: seeds {', '.join(map(str, seeds))}, {run.recipe.end} {run.recipe.unit}s")
    _say_how_many(wanted, left)
    for name in dict.fromkeys(run.dataset for run in left):
        try:
            load(name, data_dir, offline=True)
        except (DataError, OSError) as error:
            console.print(f"[yellow]missing set {name}:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)


def train_left(
    wanted: Sequence[Run], left: dict[Run, list[int]], engine: Engine, place: Place, threads: int
) -> list[Failure]:
    """Train what is not recorded; what could not be."""
    _say_how_many(wanted, left)
    with on_threads(threads):
        return engine(list(left), place)


def bar(run: Run) -> AbstractContextManager[Watch]:
    """The progress of a run."""
    from ..training import progress_bar

    return progress_bar(console, f"{run.dataset}, {run.mechanism}")


def write_texts(folder: Path, name: str, texts: dict[str, str]) -> list[Path]:
    """A file for every suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in texts}
    for suffix, text in texts.items():
        paths[suffix].write_text(text, encoding="utf-8")
    return list(paths.values())


def show_grids(grids: Sequence[Grid]) -> None:
    """Tables; the paper's rows are dim."""
    for grid in grids:
        shown = Table(title=_escape(grid.title), title_style="italic", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, heading in enumerate(grid.header):
            shown.add_column(_escape(heading), justify="left" if i < 2 else "right", no_wrap=True)
        for row in grid.rows:
            if row[0]:
                shown.add_section()
            shown.add_row(*map(_escape, row), style="dim" if row[1] == "paper" else "")
        console.print(shown)


def show_notes(notes: Sequence[str], legend: Sequence[str]) -> None:
    """What stands below the tables."""
    for note in notes:
        console.print(f"[yellow]note:[/] {_escape(note)}", highlight=False, soft_wrap=True)
    for line in legend:
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def finish(written: Sequence[Path], failures: Sequence[Failure], measured: bool) -> None:
    """Say what was written; an exit where a run failed, or where nothing is measured."""
    say(f"Written: {', '.join(map(str, written))}")
    if any(one.mechanism for one in failures) or not measured:
        raise typer.Exit(1)


def say(text: str) -> None:
    """A line, as it is."""
    console.print(_escape(text), highlight=False, soft_wrap=True)


def _say_how_many(wanted: Sequence[Run], left: dict[Run, list[int]]) -> None:
    say(f"{len(wanted) - len(left)} of {len(wanted)} runs are recorded, {len(left)} to go")
