"""What the commands of `primaldual bench` share: from the cases to a table, a record and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..base.environment import folder_name
from ..base.files import write_bytes
from .main import _escape, _fail, _no_plot, console, errors
from .main import app as main_app
from .options import device_option

if TYPE_CHECKING:
    from ..bench.session import Content, Measurement

T = TypeVar("T")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Time, achieved FLOP/s and bytes/s, peak memory, and the ratio to the best fused softmax, on this machine.",
)
main_app.add_typer(app, name="bench")


def pick_device(asked: str | None) -> torch.device:
    """The device to measure; a ValueError where there is none such."""
    device = device_option(asked)
    if device.index:
        raise ValueError(f"--device {asked}: the first GPU is measured; CUDA_VISIBLE_DEVICES makes another the first")
    return device


def parts(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """What stands between commas, each once."""
    try:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"{option} takes positive integers, such as 128,1024; got {text!r}") from None


def count_of(text: str) -> int:
    """A positive integer."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def typed(ctx: typer.Context) -> list[tuple[str, str, Any]]:
    """(name, option, value) of what stands on the command line."""
    found = []
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            found.append((str(parameter.name), parameter.opts[0], ctx.params[str(parameter.name)]))
    return found


def command_line(ctx: typer.Context) -> str:
    """The command as it was typed, without the machine's paths."""
    words = ["primaldual", *ctx.command_path.split()[1:]]
    for name, option, value in typed(ctx):
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        elif name != "output":
            words += [option, str(value)]
    return " ".join(words)


def measure_and_show(
    ctx: typer.Context,
    cases: Sequence[T],
    measure: Callable[[T], Measurement],
    device: torch.device,
    output: Path | None,
    *,
    describe: Callable[[T], str],
    tables: Callable[[Content], Sequence[Table]],
    legend: Callable[[Content], str],
    summary: Callable[[Content], Content],
    first: Callable[[], Content] = dict,
    name: str | None = None,
    picture: tuple[str, str] | None = None,
    targets_bind: bool = False,
) -> None:
    """Measure the cases, write the record, print tables, draw the picture.

    Args:
        describe: a case in a few words, for the progress bar.
        legend: below the tables, which are left out where nothing was measured.
        summary, first: as in `measure_all`.
        name: of the record's file; that of the command unless given.
        picture: the module of `primaldual.bench` and its function that draws the content: a PNG, or several by name.
        targets_bind: a missed target sets the exit status.
    """
    from ..bench.session import conditions, measure_all

    path = output or Path("results") / folder_name(device) / f"{name or ctx.info_name}.json"
    about = conditions(device, command_line(ctx))
    with _progress(cases, describe, path) as before:
        content = measure_all(cases, measure, path, about, before=before, first=first, summary=summary)
    wide = console if console.is_terminal else Console(width=max(console.width, 120))  # in a log nothing is cut
    for table in tables(content) if content["records"] else ():
        wide.print(table)
    console.print(legend(content), style="dim", highlight=False, soft_wrap=True)
    if picture:
        _draw(*picture, content, path)
    console.print(f"{content['wall_seconds']:.0f} s. Written: [bold]{_escape(str(path))}[/]", soft_wrap=True)
    if not content["complete"]:
        raise _fail(f"stopped after {len(content['records'])} of {len(cases)}; those were written", 130)
    if targets_bind and (missed := [target for target in content["targets"] if not target["met"]]):
        raise _fail(f"{len(missed)} of {len(content['targets'])} targets missed", 1)


@contextmanager
def _progress(cases: Sequence[T], describe: Callable[[T], str], path: Path) -> Iterator[Callable[[T | None], None]]:
    """A bar over the cases, on stderr; gives what to call before each, and with None before all.

    Where the path cannot be written, that is said in one line; exit status 1.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"),
        TimeRemainingColumn(),
    )  # fmt: skip
    started = count()
    try:
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("", total=len(cases))

            def before(case: T | None) -> None:
                if case is None:
                    bar.update(task, description="preparing")
                else:
                    bar.update(task, completed=next(started), description=describe(case))

            yield before
    except OSError as error:
        raise _fail(f"{path} could not be written: {error.strerror}; choose another file with --output", 1) from None


def _draw(module: str, function: str, content: Content, path: Path) -> None:
    """A PNG beside the JSON, or several, by what follows in their names."""
    try:
        drawn = getattr(import_module(f"..bench.{module}", __package__), function)(content)
    except ModuleNotFoundError as error:
        _no_plot(error)
        return
    if isinstance(drawn, bytes):
        write_bytes(path.with_suffix(".png"), drawn)
    elif drawn is not None:
        for name, picture in drawn.items():
            write_bytes(path.with_name(f"{path.stem}-{name}.png"), picture)
