"""Options that several commands have, and their values as they are typed, to what the library takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..base.devices import device_of

Device = Annotated[
    str | None, typer.Option(show_default=False, help="`cpu`, `cuda`, `cuda:1`; else a GPU where there is one.")
]

# of commands that read data sets
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="PRIMALDUAL_DATA",
        help="Holds `<Name>.zip`, or `<Name>/` with `_TRAIN.ts` and `_TEST.ts`, or archives such as "
        "`aclImdb_v1.tar.gz`; in folders too.",
        show_default=False,
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        envvar="PRIMALDUAL_CACHE",
        help="Holds what is prepared; else the user's cache directory.",
        show_default=False,
    ),
]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Take sets of other sizes than the published.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never download.")]
AllSets = Annotated[list[str] | None, typer.Argument(metavar="NAME", show_default=False)]

# of commands that train
Seeds = Annotated[int, typer.Option(min=1, help="Seeds 0, 1, … of every run, trained together.")]
Epochs = Annotated[int | None, typer.Option(min=1, show_default=False, help="To try it out; the report says so.")]
Steps = Annotated[int | None, typer.Option(min=1, show_default=False, help="The same, where a table counts in steps.")]
Dtype = Annotated[
    str | None, typer.Option(show_default=False, help="`float32`, `bfloat16` or `float64`; else the recipe's.")
]
Threads = Annotated[int, typer.Option(min=1, help="On a CPU; more pay on an idle machine only.")]
Output = Annotated[Path, typer.Option(help="The folder of records, models and checkpoints.")]
OUTPUT = Path("primaldual-runs")
Reports = Annotated[
    Path | None, typer.Option(show_default=False, help="The folder for the report; else OUTPUT/reports.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")]
OnlyReport = Annotated[bool, typer.Option("--only-report", help="Train nothing; report what is recorded.")]

# of commands that measure speed
RecordFile = Annotated[
    Path | None,
    typer.Option("--output", help="A JSON file; one in `results/<device>` unless given.", show_default=False),
]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="A PNG beside the JSON.")]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Rounds: 30 on CUDA, 7 on a CPU unless given.", show_default=False)
]
Mechanisms = Annotated[str, typer.Option(help="Of `primaldual mechanisms`.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few and short cases, few rounds.")]


def names_option(text: str | None) -> list[str] | None:
    """Names between commas.

    >>> names_option("bn, sh")
    ['bn', 'sh']
    """
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def device_option(text: str | None) -> torch.device:
    """A device that is here; a GPU, where there is one, unless given.

    >>> device_option("cpu")
    device(type='cpu')
    """
    return device_of(text, "--device")
