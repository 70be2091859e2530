"""`primaldual reproduce TABLE`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .data import DataDir, Offline
from .main import app
from .options import (
    OUTPUT,
    Device,
    DryRun,
    Dtype,
    Epochs,
    OnlyReport,
    Output,
    Reports,
    Seeds,
    Threads,
    device_option,
    names_option,
)
from .runs import asking, bar, finish, show_grids, show_notes, show_plan, to_go, train_left, working, write_texts


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
    seeds: Seeds = 5,
    epochs: Epochs = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = 1,
    output: Output = OUTPUT,
    reports: Reports = None,
    data_dir: DataDir = None,
    offline: Offline = False,
    engine: Annotated[str, typer.Option(help="What trains: `local`.")] = "local",
    dry_run: DryRun = False,
    only_report: OnlyReport = False,
) -> None:
    """Train what a table of the paper needs, and put what is measured beside the paper's numbers.

    Sizes, training, β and scales are the paper's for each set, on every device. What is recorded in the output folder
    is not run again, and an interrupted run goes on; tables share records. The report is printed and written as
    Markdown, CSV and LaTeX. Sets that are not to be had are listed.
    """
    from ..paper import ENGINES, Place, report, runs
    from ..paper.report import LEGEND
    from ..training import Store

    changes: dict[str, Any] = {"epochs": epochs, "dtype": dtype}
    part: dict[str, Any] = {"only": names_option(only), "mechanisms": names_option(mechanisms), "seeds": range(seeds)}
    part |= {name: value for name, value in changes.items() if value is not None}
    store = Store(output)
    with asking():
        if engine not in ENGINES:
            raise ValueError(f"--engine must be one of {', '.join(ENGINES)}; got {engine!r}")
        wanted = runs(table, **part)
        left = to_go(wanted, store.records())
        place = Place(output, data_dir, offline, device_option(device), bar)
    if dry_run:
        show_plan(wanted, left, data_dir)
        return
    with working():
        failures = [] if only_report else train_left(wanted, left, ENGINES[engine], place, threads)
        found = report(table, store.records(), failures=failures, **part)
        texts = {"md": found.markdown(), "csv": found.csv(), "tex": found.latex()}
        written = write_texts(reports or output / "reports", found.table.name, texts)
    show_grids(found.grids())
    show_notes(found.notes, LEGEND)
    finish(written, failures, any(cell.last for cell in found.cells.values()))
