"""`primaldual benchmark-series DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ..base.environment import cores, environment, version
from ..base.files import write_bytes
from . import options
from .benchmark_progress import watching
from .benchmark_tables import show
from .jobs import one_line_errors, say, write_texts
from .main import _escape, _fail, _no_plot, app, console

if TYPE_CHECKING:
    from ..bench.series import Job, Protocol, Stated, Store
    from ..bench.series.results import Results
    from ..data.sources import Source


@app.command(
    epilog="**Examples**\n\n- `primaldual benchmark-series uea` (a folder of zips of timeseriesclassification.com)"
    "\n\n- `primaldual benchmark-series uea --only NATOPS,Libras --against minirocket,dtw --train-only`"
    "\n\n- `primaldual benchmark-series mine --against rf,aeon.classification.interval_based.QUANTClassifier`"
    "\n\n- `primaldual benchmark-series uea --resamples 30 --seeds 1 --jobs 8`"
)
def benchmark_series(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            show_default=False,
            help="Holds `NAME.zip` of the archives, or your own `NAME_TRAIN.ts` and `NAME_TEST.ts`; in folders, too.",
        ),
    ],
    against: Annotated[
        str,
        typer.Option(
            metavar="METHOD,METHOD",
            help="Of `minirocket`, `rocket`, `multirocket`, `hydra`, `multirocket-hydra`, `quant`, `rf`, `dtw`, or a "
            "class of aeon or scikit-learn by its dotted path.",
        ),
    ] = "minirocket,multirocket-hydra,rf,dtw",
    ours: Annotated[bool, typer.Option("--ours/--no-ours", help="Run this library's estimators, too.")] = True,
    only: Annotated[
        str | None, typer.Option(metavar="SET,SET", help="Else all sets of the folder.", show_default=False)
    ] = None,
    resamples: Annotated[
        int, typer.Option(min=1, help="The archive's split, and stratified resamples of it, in all so many.")
    ] = 1,
    train_only: Annotated[
        bool, typer.Option("--train-only", help="Cross-validate in the training files; never open a test file.")
    ] = False,
    folds: Annotated[int, typer.Option(min=2, help="With --train-only.")] = 4,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="With --train-only: folds of neighbours, as for windows of one recording.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, … of every method that has a random state.")] = 3,
    limit: Annotated[
        int | None, typer.Option(min=2, show_default=False, help="Use at most so many series of every file.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Fits at a time, each in a process of its own.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Of each fit.")] = 1,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds of a fit with its predictions; 0: no limit.")
    ] = 3600.0,
    memory_limit: Annotated[
        float, typer.Option(min=0, help="GiB of a fit, on Linux: more is a failure; 0: no limit.")
    ] = 0.0,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed before.")] = False,
    output: Annotated[Path, typer.Option(help="The folder of records.")] = Path("primaldual-benchmark"),
    reports: options.Reports = None,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="aeon's diagrams as PNG.")] = True,
    dry_run: options.DryRun = False,
    only_report: options.OnlyReport = False,
) -> None:
    """Compare the library's estimators with aeon's and scikit-learn's on the same sets, splits and seeds.

    Every fit runs in a process of its own, and leaves a record; what is recorded is not run again, so that a run that
    was stopped goes on, and several processes in one folder share the work. What fails, or goes over --time-limit or
    --memory-limit, is recorded and shown, and the others go on. The report has scores, times, mean ranks and pairs; it
    is printed, and written as Markdown, CSV, JSON and PNG.

    The archive's test files tell what a method is worth. To choose between methods or settings, use --train-only.
    """
    from ..bench.series import Folds, Limits, Resamples, Store, method, run, sets_in
    from ..bench.series.methods import OURS

    with one_line_errors(2):
        if train_only and resamples > 1:
            raise ValueError("--resamples are of the archive's split; with --train-only there are --folds")
        if blocks and not train_only:
            raise ValueError("--blocks are of the training file; give --train-only, too")
        chosen = dict.fromkeys([*([OURS] if ours else []), *(options.names_option(against) or ())])
        methods = [method(name) for name in chosen]
        if len({one.name for one in methods}) < len(methods) or not methods:
            raise ValueError(f"--against needs methods of different names; got {against!r}")
        protocol: Protocol = Folds(folds, limit, blocks) if train_only else Resamples(resamples, limit)
        sources = sets_in(directory, options.names_option(only))
    with one_line_errors(1):
        from ..bench.series import jobs as jobs_of

        data, unreadable = _read(sources, protocol)
        wanted = list(jobs_of(data, methods, protocol, seeds))
    limits = Limits(jobs, threads, time_limit or None, int(memory_limit * 2**30) or None, retry)
    store = Store(output)
    with one_line_errors(1):
        left = _left(wanted, store, limits, show_them=dry_run)
        if dry_run:
            raise typer.Exit
        if left and not only_report:
            with watching(wanted, store, left, jobs) as watch:
                run(left, sources, store, limits, _about(), watch)
        names = [one.name for one in methods]
        written, found = _report(wanted, names, store, protocol, seeds, reports or output / "reports", plot)
    for name in unreadable:
        console.print(f"[yellow]note:[/] {_escape(name)}", highlight=False, soft_wrap=True)
    say(f"Written: {', '.join(map(str, written))}")
    cells = [cell for one in found for cell in one.cells.values()]
    if unreadable or any(cell.failures for cell in cells) or not any(cell.records for cell in cells):
        raise typer.Exit(1)


def _read(sources: Sequence[Source], protocol: Protocol) -> tuple[list[Stated], list[str]]:
    """The sets without their series, the smallest first; and what is wrong with those that cannot be read."""
    from ..bench.series.sets import read_set
    from ..data import DataError

    found, unreadable = [], []
    for source in sources:
        try:
            found.append(read_set(source, protocol.train_only).stated)
        except DataError as error:
            unreadable.append(str(error))
    if not found:
        raise DataError("; ".join(unreadable))
    return sorted(found, key=lambda one: one.size), unreadable


def _left(wanted: Sequence[Job], store: Store, limits: Any, *, show_them: bool) -> list[Job]:
    """What is still to be done; said in words."""
    from ..bench.series.run import open_jobs

    left = open_jobs(wanted, store, limits)
    for job in left if show_them else ():
        say(job.text())
    say(f"{len(wanted) - len(left)} of {len(wanted)} fits are recorded, {len(left)} to go")
    return left


def _about() -> dict[str, Any]:
    """What figures depend on."""
    about = environment(torch.device("cpu"))
    del about["threads"]  # a record has its own
    packages = ("aeon", "scikit-learn", "numba", "numpy", "scipy")
    return about | {name: version(name) for name in packages} | {"cores": cores()}


def _report(
    wanted: Sequence[Job], names: Sequence[str], store: Store, protocol: Protocol, seeds: int, folder: Path, plot: bool
) -> tuple[list[Path], list[Results]]:
    """Print what is recorded, and write it."""
    from ..bench.series import report
    from ..bench.series.results import results

    found = results(wanted, {job: store.record(job) for job in wanted}, names)
    if not any(cell.records or cell.failures for one in found for cell in one.cells.values()):
        raise _fail("nothing is recorded", 1)
    written = _draw(found, folder) if plot else []
    texts = {
        "md": report.markdown(found, protocol, seeds, [path.name for path in written]),
        "csv": report.csv(found), "json": report.as_json(found, protocol, seeds, _about()),
    }  # fmt: skip
    written = [*write_texts(folder, "series", texts), *written]
    show(report.grids(found, short=True), report.notes(found), report.legend(found, protocol, seeds))
    return written, found


def _draw(found: Sequence[Results], folder: Path) -> list[Path]:
    """Pictures, as far as there are packages that draw them, and enough sets and methods."""
    written = []
    try:
        from ..bench.series import plots

        for one in found:
            drawn = {"critical-difference": plots.critical_difference(one)}
            drawn |= {f"{one.methods[0]}-{rival}": plots.scatter(one, rival) for rival in one.methods[1:]}
            for name, picture in drawn.items():
                if picture is not None:
                    written.append(folder / f"{one.kind}-{name}.png")
                    write_bytes(written[-1], picture)
    except ModuleNotFoundError as error:
        _no_plot(error)
    return written
