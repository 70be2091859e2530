"""`primaldual sweep beta`, `primaldual sweep scales`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.files import write_bytes
from . import options
from .jobs import end, one_line_errors, show, train, write_texts
from .main import _no_plot, app
from .mechanism_options import scales_option

if TYPE_CHECKING:
    from ..paper.sweeps import Value
    from ..paper.swept import Swept


@app.command(
    epilog="**Examples**\n\n- `primaldual sweep beta --dry-run`"
    "\n\n- `primaldual sweep beta --only NATOPS --values 0,0.5,1`"
    "\n\n- `primaldual sweep scales --values '1,1,1,1,1,1,2,2;1,1,2,2,4,4,8,8'`"
    "\n\n- `primaldual sweep scales --mechanism bn+sh --beta 0.5`"
)
def sweep(
    setting: Annotated[str, typer.Argument(metavar="SETTING", show_default=False, help="`beta` or `scales`.")],
    only: Annotated[
        str | None,
        typer.Option(metavar="SET,SET", help="Else JapaneseVowels, Handwriting, NATOPS.", show_default=False),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE,VALUE",
            show_default=False,
            help="Such as `0,0.5,1`; for scales, one per head: `'1,1,1,1,2,2,2,2;1,1,2,2,4,4,8,8'`.",
        ),
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(show_default=False, help="Else `bn` or `sh`; also `bn+sh`, `linear-bn`, …")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(show_default=False, help="Scales of `bn+sh`: β of all sets; else the paper's.")
    ] = None,
    scales: Annotated[
        str | None, typer.Option(show_default=False, help="β of `bn+sh`: scales of all sets; else the paper's.")
    ] = None,
    validation: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the training set that is held out to choose by.")
    ] = 0.2,
    seeds: options.Seeds = 5,
    epochs: options.Epochs = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = 1,
    output: options.Output = options.OUTPUT,
    reports: options.Reports = None,
    data_dir: options.DataDir = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    only_report: options.OnlyReport = False,
) -> None:
    """Try values of β, or of the scales, on some sets: is the paper's choice special, and is there one for all?

    Sizes and training are the paper's for each set. A share of the training set is held out, and values are chosen on
    it; the test set only tells what the choice is worth. What is recorded in the output folder is not run again, and an
    interrupted run goes on. The report is printed and written as Markdown, CSV and PNG.
    """
    from ..paper import local
    from ..paper.sweep_text import LEGEND, grids, verdict
    from ..paper.sweeps import DATASETS, PARTS, VALUES, Sweep
    from ..paper.swept import swept
    from ..training import Store

    changes: dict[str, Any] = {"validation": validation, "epochs": epochs, "dtype": dtype}
    with one_line_errors(2):
        if setting not in PARTS:
            raise ValueError(f"a sweep is of {' or '.join(PARTS)}; got {setting!r}")
        other = {"beta": beta, "scales": scales_option(scales)}
        if other.pop(setting) is not None:
            raise ValueError(f"--{setting} is what the sweep is of; give --values")
        asked = Sweep(
            setting, mechanism or PARTS[setting], VALUES[setting] if values is None else _values(setting, values),
            DATASETS if only is None else tuple(dict.fromkeys(options.names_option(only) or ())), tuple(range(seeds)),
            next(iter(other.values())), {name: value for name, value in changes.items() if value is not None},
        )  # fmt: skip
        wanted = asked.jobs()
    failures = train(
        wanted, output, local, device, threads, data_dir, offline, dry_run=dry_run, only_report=only_report
    )
    with one_line_errors(1):
        found = swept(asked, Store(output).records(), failures)
        written = _write(found, reports or output / "reports")
    show(grids(found), verdict(found), found.notes, LEGEND)
    end(written, failures, bool(found.measured))


def _values(setting: str, text: str) -> tuple[Value, ...]:
    """
    >>> _values("beta", "0,0.5"), _values("scales", "1,1;2,2")
    ((0.0, 0.5), ((1, 1), (2, 2)))
    """
    try:
        if setting == "beta":
            return tuple(float(part) for part in text.split(",") if part.strip())
        lists = [part for part in text.split(";") if part.strip()]
        return tuple(tuple(int(scale) for scale in part.split(",")) for part in lists)
    except ValueError:
        such = "numbers, such as 0,0.5,1" if setting == "beta" else "a scale per head, such as 1,1,1,1;1,1,2,2"
        raise ValueError(f"--values takes {such}; got {text!r}") from None


def _write(found: Swept, folder: Path) -> list[Path]:
    """Markdown, CSV, and a picture where it can be drawn."""
    from ..paper import sweep_text

    try:
        from ..paper.sweep_plot import sweep_plot

        plot = sweep_plot(found)
    except ModuleNotFoundError as error:
        _no_plot(error)
        plot = None
    name = f"sweep-{found.sweep.setting}-{found.sweep.mechanism}"
    picture = folder / f"{name}.png"
    texts = {"md": sweep_text.markdown(found, picture.name if plot else None), "csv": sweep_text.csv(found)}
    written = write_texts(folder, name, texts)
    if plot:
        write_bytes(picture, plot)
        written.append(picture)
    return written
