"""`primaldual reproduce table-language`: language models of IMDb with one mechanism after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.files import write_bytes
from .jobs import end, one_line_errors, show, train, write_texts
from .main import _no_plot

if TYPE_CHECKING:
    from ..paper import Engine


def reproduce(
    part: Mapping[str, Any], output: Path, reports: Path | None, engine: Engine, device: str | None, threads: int,
    data_dir: Path | None, offline: bool, *, dry_run: bool, only_report: bool,
) -> None:  # fmt: skip
    """Train what is missing, and write the table, and the plot of loss against FLOPs."""
    from ..paper.language import NAME, jobs
    from ..paper.language_table import LEGEND, measured
    from ..training import Store

    with one_line_errors(2):
        wanted = jobs(**part)
    failures = train(
        list(wanted.values()), output, engine, device, threads, data_dir, offline, dry_run=dry_run,
        only_report=only_report,
    )  # fmt: skip
    with one_line_errors(1):
        table = measured(wanted, Store(output).records(), failures)
        folder = reports or output / "reports"
        written = write_texts(folder, NAME, {"md": table.markdown(), "csv": table.csv(), "tex": table.latex()})
        try:
            from ..paper.language_plot import language_plot

            if picture := language_plot(table):
                write_bytes(folder / f"{NAME}.png", picture)
                written.append(folder / f"{NAME}.png")
        except ModuleNotFoundError as error:
            _no_plot(error)
    show(table.grids(), (), table.notes, LEGEND)
    end(written, failures, any(cell.values("last") for cell in table.cells.values()))
