"""`primaldual mechanisms`, `primaldual explain NAME`, `primaldual demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape as _escape
from typer.core import TyperGroup

from ..base.command import imported
from ..base.packages import MissingPackageError
from ..base.terminal import replace_unwritable
from ..base.version import __version__
from ..data import DataError
from ..demo import DemoError, Settings, run_demo
from ..demo.terminal import summary_table
from ..dual import derive
from .mechanism_options import mechanism_option, with_mechanism_options
from .table import LEGEND, mechanisms_table


class _Commands(TyperGroup):
    """All commands; help and errors are written by them, too."""

    def main(self, *given: Any, **named: Any) -> Any:
        """An interrupt is an exception from here on; what a terminal, a pipe or a log has no sign for is replaced."""
        imported()
        replace_unwritable()
        return super().main(*given, **named)


app = typer.Typer(
    cls=_Commands,
    name="primaldual",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="State a neural-network layer and the data it is fitted to; get the attention that is its dual.",
    epilog="**Start here**\n\n- `primaldual mechanisms`\n\n- `primaldual explain bn+sh`\n\n- `primaldual demo`",
)
console = Console()
errors = Console(stderr=True)


def _fail(message: object, status: int) -> typer.Exit:
    """Print one line to stderr and give the exit to raise."""
    errors.print(f"[bold red]error:[/] {_escape(str(message))}", soft_wrap=True, highlight=False)
    return typer.Exit(status)


def _no_plot(error: ModuleNotFoundError) -> None:
    """Say which package a picture needs."""
    console.print(f'[yellow]note:[/] no plot without {error.name}: pip install "primaldual\\[demo]"')


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"primaldual {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("mechanisms")
def mechanisms_command() -> None:
    """List every named mechanism and the primal layer that it is the dual of.

    Each is a value of `Primal`: features Φ, normaliser h, input maps T and training set S.
    """
    console.print(mechanisms_table())
    console.print(LEGEND, style="dim", highlight=False)
    console.print("primaldual explain NAME derives one of them.", style="dim", highlight=False)


@app.command(
    epilog="**Examples**\n\n- `primaldual explain bn --beta 0.6`\n\n- `primaldual explain sh --scales 1,1,2,2 --latex`"
    "\n\n- `primaldual explain conv2d --size 3x3 --grid 14x14`\n\n- `primaldual explain sparse --pattern window:16`"
)
@with_mechanism_options
def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of `primaldual mechanisms`.", show_default=False)],
    *,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    settings: dict[str, Any],
) -> None:
    """Derive a mechanism: its primal problem, the stationarity conditions, the attention that follows, its cost."""
    if latex and markdown:
        raise _fail("choose one of --latex and --markdown", 2)
    try:
        expansion = derive(mechanism_option(name, settings))
        typer.echo(expansion.explain("latex" if latex else "markdown" if markdown else "text"))
    except (ValueError, TypeError) as error:
        raise _fail(error, 2) from None


@app.command(epilog="**Examples**\n\n- `primaldual demo`\n\n- `primaldual demo --seeds 3 --epochs 10 --output quick`")
def demo(
    output: Annotated[Path, typer.Option(help="The folder to write into.")] = Path("primaldual-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Models per mechanism.")] = Settings.seeds,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each.")] = Settings.epochs,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds to stay within, by fewer seeds; 0: no limit.")
    ] = Settings.budget,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that holds other files.")] = False,
) -> None:
    """Derive, check and train the four softmax-family mechanisms on BasicMotions, and write a report.

    Needs no network and under three minutes on one CPU core. Writes `report.html`, `results.json` and `heads.png`.
    """
    settings = Settings(seeds=seeds, epochs=epochs, budget=budget or float("inf"))
    try:
        results = run_demo(output, settings, force=force, console=console)
    except (DemoError, DataError, MissingPackageError) as error:
        raise _fail(error, getattr(error, "status", 1)) from None
    except KeyboardInterrupt:
        raise _fail("stopped; nothing was written", 130) from None
    console.print(summary_table(results))
    for note in results.notes:
        console.print(f"[yellow]note:[/] {_escape(note)}")
    console.print(
        f"{results.seconds:.0f} s. The report: [bold]{_escape(str((output / 'report.html').resolve()))}[/]",
        soft_wrap=True,
    )
