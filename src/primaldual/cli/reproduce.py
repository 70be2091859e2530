"""`primaldual reproduce TABLE`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from .data import DataDir, Offline
from .main import _escape, _fail, app, console
from .train import _device, _threads

if TYPE_CHECKING:
    from ..paper import Problem, Report, Run
    from ..training import Record, Watch


@app.command(
    epilog="**Examples**\n\n- `primaldual reproduce table-uea --dry-run`"
    "\n\n- `primaldual reproduce table-uea --only JapaneseVowels,Handwriting --mechanisms softmax,bn,qk-norm`"
    "\n\n- `primaldual reproduce table-regression --seeds 3 --output runs`"
)
def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            show_default=False,
            help="`table-uea`, `table-uea-linear`, `table-uea-sparse`, `table-uea-more` or `table-regression`.",
        ),
    ],
    only: Annotated[str | None, typer.Option(metavar="SET,SET", help="Some of its sets.", show_default=False)] = None,
    mechanisms: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Instead of the paper's, such as `softmax,bn,sh,bn+sh,qk-norm`."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, … of every run, trained together.")] = 5,
    epochs: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="To try it out; the report says so.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(show_default=False, help="`float32`, `bfloat16` or `float64`; else the recipe's.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(show_default=False, help="`cpu`, `cuda`, `cuda:1`; else a GPU where there is one.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="On a CPU; more pay on an idle machine only.")] = 1,
    output: Annotated[Path, typer.Option(help="The folder of records, models and checkpoints.")] = Path(
        "primaldual-runs"
    ),
    reports: Annotated[
        Path | None, typer.Option(show_default=False, help="The folder for the report; else OUTPUT/reports.")
    ] = None,
    data_dir: DataDir = None,
    offline: Offline = False,
    engine: Annotated[str, typer.Option(help="What trains: `local`.")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")] = False,
    only_report: Annotated[bool, typer.Option("--only-report", help="Train nothing; report what is recorded.")] = False,
) -> None:
    """Train what a table of the paper needs, and put what is measured beside the paper's numbers.

    Sizes, training, β and scales are the paper's for each set, on every device. What is recorded in the output folder
    is not run again, and an interrupted run goes on; tables share records. The report is printed and written as
    Markdown, CSV and LaTeX. Sets that are not to be had are listed.
    """
    from ..paper import ENGINES, Place, report, runs
    from ..training import Store

    changes: dict[str, Any] = {"epochs": epochs, "dtype": dtype}
    part: dict[str, Any] = {"only": _names(only), "mechanisms": _names(mechanisms), "seeds": range(seeds)}
    part |= {name: value for name, value in changes.items() if value is not None}
    store, problems = Store(output), list["Problem"]()
    try:
        if engine not in ENGINES:
            raise ValueError(f"--engine must be one of {', '.join(ENGINES)}; got {engine!r}")
        wanted = runs(table, **part)
        for run in wanted:
            run.config()
        left = _left(wanted, store.records())
        place = Place(output, data_dir, offline, _device(device), _bar)
    except (ValueError, TypeError) as error:
        raise _fail(error, 2) from None
    if dry_run:
        _plan(wanted, left, data_dir)
        return
    try:
        if not only_report:
            _say(f"{len(wanted) - len(left)} of {len(wanted)} runs are recorded, {len(left)} to go")
            with _threads(threads):
                problems = ENGINES[engine](list(left), place)
        found = report(table, store.records(), problems=problems, **part)
        written = _write(found, reports or output / "reports")
    except (ValueError, OSError) as error:
        raise _fail(error, 1) from None
    except KeyboardInterrupt:
        raise _fail("stopped; the same command goes on from the last checkpoint", 130) from None
    _print(found)
    _say(f"Written: {', '.join(map(str, written))}")
    if any(problem.mechanism for problem in problems) or not any(cell.last for cell in found.cells.values()):
        raise typer.Exit(1)


def _bar(run: Run) -> AbstractContextManager[Watch]:
    from ..training import progress_bar

    return progress_bar(console, f"{run.dataset}, {run.mechanism}")


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _left(wanted: list[Run], records: list[Record]) -> dict[Run, list[int]]:
    """Runs with seeds that are not recorded, and those seeds."""
    found = {run: run.find(records) for run in wanted}
    left = {run: [seed for seed in run.seeds if seed not in records] for run, records in found.items()}
    return {run: seeds for run, seeds in left.items() if seeds}


def _plan(wanted: list[Run], left: dict[Run, list[int]], data_dir: Path | None) -> None:
    """What would run; nothing is downloaded for it."""
    from ..data import DataError, load

    for run, seeds in left.items():
        _say(f"{run.dataset}, {run.mechanism}: seeds {', '.join(map(str, seeds))}, {run.recipe.epochs} epochs")
    _say(f"{len(wanted) - len(left)} of {len(wanted)} runs are recorded, {len(left)} to go")
    for name in dict.fromkeys(run.dataset for run in left):
        try:
            load(name, data_dir, offline=True)
        except (DataError, OSError) as error:
            console.print(f"[yellow]missing set {name}:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)


def _write(found: Report, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"md": found.markdown(), "csv": found.csv(), "tex": found.latex()}
    for suffix, text in texts.items():
        (folder / f"{found.table.name}.{suffix}").write_text(text, encoding="utf-8")
    return [folder / f"{found.table.name}.{suffix}" for suffix in texts]


def _print(found: Report) -> None:
    from ..paper.report import LEGEND

    for grid in found.grids():
        shown = Table(title=_escape(grid.title), title_style="italic", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, heading in enumerate(grid.header):
            shown.add_column(_escape(heading), justify="left" if i < 2 else "right", no_wrap=True)
        for row in grid.rows:
            if row[0]:
                shown.add_section()
            shown.add_row(*map(_escape, row), style="dim" if row[1] == "paper" else "")
        console.print(shown)
    for note in found.notes:
        console.print(f"[yellow]note:[/] {_escape(note)}", highlight=False, soft_wrap=True)
    for line in LEGEND:
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def _say(text: str) -> None:
    console.print(_escape(text), highlight=False, soft_wrap=True)
