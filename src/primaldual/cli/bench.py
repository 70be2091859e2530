"""What the commands of `primaldual bench` share: options, a progress bar, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..base.files import write_bytes
from .main import _escape, _fail, _no_plot, app, console, errors

T = TypeVar("T")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
Mechanisms = Annotated[str, typer.Option(help="Of `primaldual mechanisms`.")]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="A PNG beside the JSON.")]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Rounds: 30 on CUDA, 7 on a CPU unless given.", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="`cuda` or `cpu`; a GPU where there is one.", show_default=False)]

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Time, achieved FLOP/s and bytes/s, peak memory, and the ratio to the best fused softmax, on this machine.",
)
app.add_typer(bench, name="bench")


def pick_device(asked: str | None) -> torch.device:
    """The device to measure; a ValueError where there is none such."""
    if asked not in (None, "cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu, got {asked!r}")
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


def parts(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """What stands between commas, each once."""
    try:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"{option} takes positive integers, such as 128,1024; got {text!r}") from None


def given(ctx: typer.Context) -> list[tuple[str, str, Any]]:
    """(name, option, value) of what stands on the command line."""
    found = []
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            found.append((str(parameter.name), parameter.opts[0], ctx.params[str(parameter.name)]))
    return found


def command_line(ctx: typer.Context) -> str:
    """The command as it was typed, without the machine's paths."""
    words = ["primaldual", "bench", str(ctx.info_name)]
    for name, option, value in given(ctx):
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        elif name != "output":
            words += [option, str(value)]
    return " ".join(words)


@contextmanager
def measuring(cases: Sequence[T], describe: Callable[[T], str], path: Path) -> Iterator[Callable[[T | None], None]]:
    """A bar over the cases, on stderr; gives what to call before each, and with None before the ceilings.

    Where the path cannot be written, that is said in one line; exit status 1.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"),
        TimeRemainingColumn(),
    )  # fmt: skip
    started = count()
    try:
        with Progress(*columns, console=errors, transient=True) as bar:
            task = bar.add_task("", total=len(cases))

            def before(case: T | None) -> None:
                if case is None:
                    bar.update(task, description="ceilings")
                else:
                    bar.update(task, completed=next(started), description=describe(case))

            yield before
    except OSError as error:
        raise _fail(f"{path} could not be written: {error.strerror}; choose another file with --output", 1) from None


def show(tables: Sequence[Table]) -> None:
    """Tables; a log has no width of its own, so nothing is cut there."""
    wide = console if console.is_terminal else Console(width=max(console.width, 120))
    for one in tables:
        wide.print(one)


def draw(module: str, function: str, content: dict[str, Any], path: Path) -> None:
    """What a module of `primaldual.bench` draws of the content, beside the JSON."""
    try:
        picture = getattr(import_module(f"..bench.{module}", __package__), function)(content)
    except ModuleNotFoundError as error:
        _no_plot(error)
        return
    if picture is not None:
        write_bytes(path.with_suffix(".png"), picture)


def finish(content: dict[str, Any], path: Path, cases: int, fails: bool) -> None:
    """Say what was written; an exit where the run was stopped, or where a target is missed and that `fails`."""
    console.print(f"{content['wall_seconds']:.0f} s. Written: [bold]{_escape(str(path))}[/]", soft_wrap=True)
    if not content["complete"]:
        raise _fail(f"stopped after {len(content['records'])} of {cases}; those were written", 130)
    if fails and (missed := [target for target in content["targets"] if not target["met"]]):
        raise _fail(f"{len(missed)} of {len(content['targets'])} targets missed", 1)
