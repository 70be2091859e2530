"""`primaldual sweep beta`, `primaldual sweep scales`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from .data import DataDir, Offline
from .main import _escape, _fail, app, console
from .options import scales_option
from .reproduce import _bar, _left, _names, _plan, _say
from .train import _device, _threads

if TYPE_CHECKING:
    from ..paper import Problem
    from ..paper.sweeps import Value
    from ..paper.swept import Swept


@app.command(
    epilog="**Examples**\n\n- `primaldual sweep beta --dry-run`"
    "\n\n- `primaldual sweep beta --only NATOPS --values 0,0.5,1`"
    "\n\n- `primaldual sweep scales --values 1,1,1,1,1,1,2,2;1,1,2,2,4,4,8,8`"
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
            help="Such as `0,0.5,1`; for scales, one per head: `1,1,1,1,2,2,2,2;1,1,2,2,4,4,8,8`.",
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")] = False,
    only_report: Annotated[bool, typer.Option("--only-report", help="Train nothing; report what is recorded.")] = False,
) -> None:
    """Try values of β, or of the scales, on some sets: is the paper's choice special, and is there one for all?

    Sizes and training are the paper's for each set. A share of the training set is held out, and values are chosen on
    it; the test set only tells what the choice is worth. What is recorded in the output folder is not run again, and an
    interrupted run goes on. The report is printed and written as Markdown, CSV and PNG.
    """
    from ..paper import Place, local
    from ..paper.sweeps import DATASETS, PARTS, VALUES, Sweep
    from ..paper.swept import swept
    from ..training import Store

    changes: dict[str, Any] = {"validation": validation, "epochs": epochs, "dtype": dtype}
    store, problems = Store(output), list["Problem"]()
    try:
        if setting not in PARTS:
            raise ValueError(f"a sweep is of {' or '.join(PARTS)}; got {setting!r}")
        other = {"beta": beta, "scales": scales_option(scales)}
        if other.pop(setting) is not None:
            raise ValueError(f"--{setting} is what the sweep is of; give --values")
        asked = Sweep(
            setting, mechanism or PARTS[setting], VALUES[setting] if values is None else _values(setting, values),
            DATASETS if only is None else tuple(dict.fromkeys(_names(only) or ())), tuple(range(seeds)),
            next(iter(other.values())), {name: value for name, value in changes.items() if value is not None},
        )  # fmt: skip
        wanted = asked.runs()
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
                problems = local(list(left), place)
        found = swept(asked, store.records(), problems)
        written = _write(found, reports or output / "reports")
    except (ValueError, OSError) as error:
        raise _fail(error, 1) from None
    except KeyboardInterrupt:
        raise _fail("stopped; the same command goes on from the last checkpoint", 130) from None
    _print(found)
    _say(f"Written: {', '.join(map(str, written))}")
    if any(problem.mechanism for problem in problems) or not found.measured:
        raise typer.Exit(1)


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
    from ..paper import sweep_text

    try:
        from ..paper.sweep_plot import sweep_plot

        plot = sweep_plot(found)
    except ModuleNotFoundError as error:
        console.print(f'[yellow]note:[/] no plot without {error.name}: pip install "primaldual\\[demo]"')
        plot = None
    stem = folder / f"sweep-{found.sweep.setting}-{found.sweep.mechanism}"
    picture = stem.with_suffix(".png")
    texts = {".md": sweep_text.markdown(found, picture.name if plot else None), ".csv": sweep_text.csv(found)}
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in texts.items():
        stem.with_suffix(suffix).write_text(text, encoding="utf-8")
    if plot:
        picture.write_bytes(plot)
    return [*map(stem.with_suffix, texts), *([picture] if plot else [])]


def _print(found: Swept) -> None:
    from ..paper.sweep_text import LEGEND, grids, verdict

    for grid in grids(found):
        shown = Table(title=_escape(grid.title), title_style="italic", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, heading in enumerate(grid.header):
            shown.add_column(_escape(heading), justify="left" if i < 2 else "right", no_wrap=True)
        for row in grid.rows:
            if row[0]:
                shown.add_section()
            shown.add_row(*map(_escape, row))
        console.print(shown)
    for line in verdict(found):
        console.print(_escape(line), highlight=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"[yellow]note:[/] {_escape(note)}", highlight=False, soft_wrap=True)
    for line in LEGEND:
        console.print(line, style="dim", highlight=False, soft_wrap=True)
