"""`primaldual reproduce TABLE`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import head_distance, language, options
from .jobs import end, one_line_errors, show, train, write_texts
from .main import app


@app.command(
    epilog="**Examples**\n\n- `primaldual reproduce table-uea --dry-run`"
    "\n\n- `primaldual reproduce table-uea --only JapaneseVowels,Handwriting --mechanisms softmax,bn,qk-norm`"
    "\n\n- `primaldual reproduce table-regression --seeds 3 --output runs`"
    "\n\n- `primaldual reproduce table-language --only small --seeds 3 --data-dir ~/downloads`"
    "\n\n- `primaldual reproduce table-lra --only lra-listops --seeds 3 --device cuda`"
)
def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            show_default=False,
            help="`table-uea`, `table-uea-linear`, `table-uea-sparse`, `table-uea-more`, `table-regression`, "
            "`table-lra`, `table-lra-conv1d`, `table-learnable-beta`, `table-head-distance` or `table-language`.",
        ),
    ],
    only: Annotated[
        str | None,
        typer.Option(metavar="SET,SET", help="Some of its sets; of `table-language` sizes.", show_default=False),
    ] = None,
    mechanisms: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Instead of the paper's, such as `softmax,bn,sh,bn+sh,qk-norm`."),
    ] = None,
    seeds: options.Seeds = 5,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = 1,
    output: options.Output = options.OUTPUT,
    reports: options.Reports = None,
    data_dir: options.DataDir = None,
    offline: options.Offline = False,
    engine: Annotated[str, typer.Option(help="What trains: `local`.")] = "local",
    dry_run: options.DryRun = False,
    only_report: options.OnlyReport = False,
) -> None:
    """Train what a table needs, and put what is measured beside the paper's numbers, where it has any.

    Sizes, training, β and scales are the paper's for each set, on every device. What is recorded in the output folder
    is not run again, and an interrupted run goes on; tables share records. The report is printed and written as
    Markdown, CSV and LaTeX. Sets that are not to be had are listed.
    """
    from ..paper import ENGINES, compare, jobs
    from ..paper import head_distance as distances
    from ..paper import language as of_language
    from ..training import Store

    changes: dict[str, Any] = {"epochs": epochs, "steps": steps, "dtype": dtype}
    part: dict[str, Any] = {"only": options.names_option(only), "mechanisms": options.names_option(mechanisms)}
    part |= {"seeds": range(seeds)} | {name: value for name, value in changes.items() if value is not None}
    with one_line_errors(2):
        if engine not in ENGINES:
            raise ValueError(f"--engine must be one of {', '.join(ENGINES)}; got {engine!r}")
        if table == of_language.NAME:
            language.reproduce(
                part, output, reports, ENGINES[engine], device, threads, data_dir, offline, dry_run=dry_run,
                only_report=only_report,
            )  # fmt: skip
            return
        if table == distances.NAME:
            where = options.device_option(device)
            head_distance.reproduce(
                part, output, reports, ENGINES[engine], where, threads, data_dir, offline, dry_run=dry_run,
                only_report=only_report,
            )  # fmt: skip
            return
        wanted = jobs(table, **part)
    failures = train(
        wanted, output, ENGINES[engine], device, threads, data_dir, offline, dry_run=dry_run, only_report=only_report
    )
    with one_line_errors(1):
        found = compare(table, Store(output).records(), failures=failures, **part)
        texts = {"md": found.markdown(), "csv": found.csv(), "tex": found.latex()}
        written = write_texts(reports or output / "reports", found.table.name, texts)
    show(found.grids(), (), found.notes, found.legend)
    end(written, failures, any(cell.last for cell in found.cells.values()))
