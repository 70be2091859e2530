"""`primaldual data list`, `info NAME`, `prepare NAME…`, `verify`."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from .data_sequences import is_of_sequences, prepare_sequences, sequences_info, sequences_line, sequences_table
from .data_series import series_info, series_line, series_table
from .data_text import is_of_text, text_info, text_line, text_table
from .main import _escape, _fail, app, console
from .options import AllSets, CacheDir, DataDir, NoCheck, Offline

commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Time series of the UEA and TSER archives, long sequences of the Long Range Arena, and text: find, check, "
    "prepare.",
    epilog="**Examples**\n\n- `primaldual data list`\n\n- `primaldual data info JapaneseVowels`"
    "\n\n- `primaldual data prepare --all --data-dir ~/uea`\n\n- `primaldual data prepare lra-listops`"
    "\n\n- `primaldual data verify`",
)
app.add_typer(commands, name="data")


@commands.command(
    "list", epilog="**Examples**\n\n- `primaldual data list`\n\n- `primaldual data list --data-dir ~/uea`"
)
def list_command(data_dir: DataDir = None, cache_dir: CacheDir = None) -> None:
    """List the sets of known size, and those that are here, with where they are."""
    from ..base.cache import cache_directory
    from ..data import DataError
    from ..data.sources import data_directory

    try:
        store, directory = cache_directory(cache_dir), data_directory(data_dir)
    except DataError as error:
        raise _fail(error, 2) from None
    console.print(series_table(store, directory))
    console.print(sequences_table(store, directory))
    console.print(text_table(store, directory))
    for line in (f"cache: {store}", f"data: {directory or 'no data directory given'}"):
        console.print(_escape(line), style="dim", highlight=False, soft_wrap=True)


@commands.command(
    epilog="**Examples**\n\n- `primaldual data info JapaneseVowels`"
    "\n\n- `primaldual data info lra-text --data-dir ~/lra`"
)
def info(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="One of `primaldual data list`.")],
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
    no_check: NoCheck = False,
    offline: Offline = False,
) -> None:
    """Say what a set holds; it is prepared first if need be, unless it would have to be generated."""
    from ..base.cache import cache_directory
    from ..data import DataError, load

    try:
        if is_of_sequences(name):
            rows, notes = sequences_info(name, data_dir, cache_dir, not no_check)
        elif is_of_text(name, cache_directory(cache_dir)):
            rows, notes = text_info(name, data_dir, cache_dir, not no_check)
        else:
            data = load(name, data_dir, cache_dir=cache_dir, check=not no_check, offline=offline)
            rows, notes = series_info(data), data.notes
    except (DataError, OSError) as error:
        raise _fail(error, 1) from None
    table = Table(box=None, show_header=False, title=_escape(name), title_justify="left", title_style="bold cyan")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # paths are shown whole
    for label, value in [*rows.items(), *(("" if i else "note", note) for i, note in enumerate(notes))]:
        table.add_row(label, _escape(value))
    console.print(table)


@commands.command(
    epilog="**Examples**\n\n- `primaldual data prepare JapaneseVowels BasicMotions`"
    "\n\n- `primaldual data prepare --all --data-dir ~/uea`"
    "\n\n- `primaldual data prepare lra-listops lra-text --data-dir ~/lra`"
)
def prepare(
    names: AllSets = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every set in the data directory; what is generated is not among them.")
    ] = False,
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
    no_check: NoCheck = False,
    offline: Offline = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Read or generate again what is prepared already.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="That generate; one per core unless given.")
    ] = None,
) -> None:
    """Read, check and bring sets into shape, or generate them, and keep them: what follows reads them from there.

    The folder of prepared sets can be copied to a machine without raw files and without aeon; `PRIMALDUAL_CACHE`
    names it there. Exit status 1 if a set fails; the others are prepared all the same.
    """
    from ..data import DataError, load
    from ..data.sequences.catalogue import names_in as sequences_in
    from ..data.sources import data_directory, names_in
    from ..data.text import load as load_text
    from ..data.text.loading import names_in as text_in

    try:
        directory = data_directory(data_dir)
    except DataError as error:
        raise _fail(error, 2) from None
    if every == bool(names):
        raise _fail("give the NAMEs of sets, or --all", 2)
    if every and directory is None:
        raise _fail("--all needs --data-dir or PRIMALDUAL_DATA", 2)
    failed = 0
    here = [] if directory is None else [*names_in(directory), *sequences_in(directory), *text_in(directory)]
    for name in names or here:
        start = time.perf_counter()
        try:
            if is_of_sequences(name):
                long = prepare_sequences(name, directory, cache_dir, not no_check, rebuild, processes)
                line, notes = sequences_line(long), long.notes
            elif is_of_text(name):
                text = load_text(name, directory, cache_dir=cache_dir, check=not no_check, rebuild=rebuild)
                line, notes = text_line(text), text.notes
            else:
                data = load(
                    name, directory, cache_dir=cache_dir, check=not no_check, offline=offline, rebuild=rebuild,
                    must_keep=True,
                )  # fmt: skip
                line, notes = series_line(data), data.notes
        except (DataError, OSError) as error:
            _fail(error, 1)
            failed += 1
            continue
        console.print(f"[green]ok[/] {line}, {time.perf_counter() - start:.1f} s", highlight=False, soft_wrap=True)
        for note in notes:
            console.print(_escape(f"   {note}"), style="dim", highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@commands.command(epilog="**Examples**\n\n- `primaldual data verify`\n\n- `primaldual data verify --data-dir ~/uea`")
def verify(
    names: AllSets = None,
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Check prepared sets: whole, of the published sizes, and made from the files in the data directory.

    All of them unless some are named. Exit status 1 if one is not as it should be.
    """
    from ..base.cache import cache_directory
    from ..data import DataError, loading
    from ..data.cache import cached_names
    from ..data.sequences import loading as sequences
    from ..data.sequences.store import stored_names
    from ..data.sources import data_directory
    from ..data.text import loading as text
    from ..data.text.store import stored_names as stored_texts

    try:
        store, directory = cache_directory(cache_dir), data_directory(data_dir)
    except DataError as error:
        raise _fail(error, 2) from None
    chosen = names or [*cached_names(store), *stored_names(store), *stored_texts(store)]
    if not chosen:
        raise _fail(f"nothing is prepared in {store}; primaldual data prepare NAME does that", 1)
    bad = 0
    for name in chosen:
        if is_of_sequences(name):
            long, found = sequences.problems(name, directory, store)
            line = "" if long is None else f"{sequences_line(long)}, {long.hash[:12]}"
        elif is_of_text(name, store):
            kept, found = text.problems(name, directory, store)
            line = "" if kept is None else f"{text_line(kept)}, {kept.hash[:12]}"
        else:
            data, found = loading.problems(name, directory, store)
            line = "" if data is None else f"{series_line(data)}, {data.hash[:12]}"
        bad += bool(found)
        for problem in found:
            _fail(f"{name}: {problem}", 1)
        if not found:
            console.print(f"[green]ok[/] {line}", highlight=False, soft_wrap=True)
    console.print(f"{len(chosen) - bad} of {len(chosen)} sets are as they should be", highlight=False)
    if bad:
        raise typer.Exit(1)
