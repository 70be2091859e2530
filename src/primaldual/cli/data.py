"""`primaldual data list`, `info NAME`, `prepare NAME…`, `verify`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from .main import _escape, _fail, app, console
from .options import AllSets, CacheDir, DataDir, NoCheck, Offline

if TYPE_CHECKING:
    from ..data import Dataset

commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Time series of the UEA and TSER archives: find, check, prepare.",
    epilog="**Examples**\n\n- `primaldual data list`\n\n- `primaldual data info JapaneseVowels`"
    "\n\n- `primaldual data prepare --all --data-dir ~/uea`\n\n- `primaldual data verify`",
)
app.add_typer(commands, name="data")


@commands.command(
    "list", epilog="**Examples**\n\n- `primaldual data list`\n\n- `primaldual data list --data-dir ~/uea`"
)
def list_command(data_dir: DataDir = None, cache_dir: CacheDir = None) -> None:
    """List the sets of known size, and those that are here, with where they are."""
    from ..base.cache import cache_directory
    from ..data import DataError, manifest
    from ..data.cache import cached_names
    from ..data.sources import data_directory, in_aeon, names_in

    try:
        store, directory = cache_directory(cache_dir), data_directory(data_dir)
    except DataError as error:
        raise _fail(error, 2) from None
    cached, found = cached_names(store), names_in(directory) if directory else []
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("set", style="bold cyan", no_wrap=True)
    for heading in ("cases", "shape", "classes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    for name in sorted({*manifest(), *cached, *found}, key=str.lower):
        sizes = ["–"] * 3
        if entry := manifest().get(name):
            cases = ("~" if entry.approximate else "") + "+".join(map(str, entry.cases[0]))
            sizes = [cases, f"{entry.length}×{entry.channels}", str(entry.classes or "–")]
        places = {"cache": name in cached, "data": name in found, "aeon": in_aeon(name) is not None}
        table.add_row(name, *sizes, ", ".join(place for place, there in places.items() if there) or "[dim]–[/]")
    console.print(table)
    for line in (f"cache: {store}", f"data: {directory or 'no data directory given'}"):
        console.print(_escape(line), style="dim", highlight=False, soft_wrap=True)


@commands.command(epilog="**Examples**\n\n- `primaldual data info JapaneseVowels`")
def info(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="One of `primaldual data list`.")],
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
    no_check: NoCheck = False,
    offline: Offline = False,
) -> None:
    """Say what a set holds; it is prepared first if need be."""
    from ..data import DataError, load

    try:
        data = load(name, data_dir, cache_dir=cache_dir, check=not no_check, offline=offline)
    except (DataError, OSError) as error:
        raise _fail(error, 1) from None
    ends = data.train.lengths
    lengths = f"{data.length}" if int(ends.min()) == data.length else f"{int(ends.min())} to {data.length}"
    rows = {"kind": data.kind, "cases": f"{len(data.train)} training, {len(data.test)} test", "length": lengths}
    rows |= {"channels": str(data.channels)}
    if data.classes:
        counts = data.train.y.bincount(minlength=len(data.classes)).tolist()
        rows |= {"classes": ", ".join(f"{c} ({n})" for c, n in zip(data.classes, counts, strict=True))}
    else:
        y = data.train.y
        rows |= {"targets": f"{y.min():.4g} to {y.max():.4g}, mean {y.mean():.4g}, std {y.std():.4g}"}
    rows |= {"from": data.origin, "hash": data.hash} | {
        "note" if i == 0 else " " * i: n for i, n in enumerate(data.notes)
    }
    table = Table(box=None, show_header=False, title=_escape(data.name), title_justify="left", title_style="bold cyan")
    for label, value in rows.items():
        table.add_row(label.strip(), _escape(value))
    console.print(table)


@commands.command(
    epilog="**Examples**\n\n- `primaldual data prepare JapaneseVowels BasicMotions`"
    "\n\n- `primaldual data prepare --all --data-dir ~/uea`"
)
def prepare(
    names: AllSets = None,
    every: Annotated[bool, typer.Option("--all", help="Every set in the data directory.")] = False,
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
    no_check: NoCheck = False,
    offline: Offline = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Parse again what is prepared already.")] = False,
) -> None:
    """Parse, check and standardise sets, and keep them as safetensors.

    The folder of prepared sets can be copied to a machine without raw files and without aeon; `PRIMALDUAL_CACHE`
    names it there. Exit status 1 if a set fails; the others are prepared all the same.
    """
    from ..data import DataError, load
    from ..data.sources import data_directory, names_in

    try:
        directory = data_directory(data_dir)
    except DataError as error:
        raise _fail(error, 2) from None
    if every == bool(names):
        raise _fail("give the NAMEs of sets, or --all", 2)
    if every and directory is None:
        raise _fail("--all needs --data-dir or PRIMALDUAL_DATA", 2)
    failed = 0
    for name in names or names_in(directory):  # type: ignore[arg-type]  # not None with --all
        start = time.perf_counter()
        try:
            data = load(
                name, directory, cache_dir=cache_dir, check=not no_check, offline=offline, rebuild=rebuild
            )  # fmt: skip
        except (DataError, OSError) as error:
            _fail(error, 1)
            failed += 1
            continue
        console.print(
            f"[green]ok[/] {_line(data)}, {time.perf_counter() - start:.1f} s", highlight=False, soft_wrap=True
        )
        for note in data.notes:
            console.print(_escape(f"   {note}"), style="dim", highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@commands.command(epilog="**Examples**\n\n- `primaldual data verify`\n\n- `primaldual data verify --data-dir ~/uea`")
def verify(
    names: AllSets = None,
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Check prepared sets: whole, of the archive's sizes, and made from the files in the data directory.

    All of them unless some are named. Exit status 1 if one is not as it should be.
    """
    from ..base.cache import cache_directory
    from ..data import DataError
    from ..data.cache import cached_names
    from ..data.loading import problems
    from ..data.sources import data_directory

    try:
        store, directory = cache_directory(cache_dir), data_directory(data_dir)
    except DataError as error:
        raise _fail(error, 2) from None
    chosen = names or cached_names(store)
    if not chosen:
        raise _fail(f"nothing is prepared in {store}; primaldual data prepare NAME does that", 1)
    bad = 0
    for name in chosen:
        data, found = problems(name, directory, store)
        bad += bool(found)
        for problem in found:
            _fail(f"{name}: {problem}", 1)
        if data is not None and not found:
            console.print(f"[green]ok[/] {_line(data)}, {data.hash[:12]}", highlight=False, soft_wrap=True)
    console.print(f"{len(chosen) - bad} of {len(chosen)} sets are as they should be", highlight=False)
    if bad:
        raise typer.Exit(1)


def _line(data: Dataset) -> str:
    what = f", {len(data.classes)} classes" if data.classes else ", regression"
    return _escape(f"{data.name}: {len(data.train)} + {len(data.test)} series, {data.length} × {data.channels}{what}")
