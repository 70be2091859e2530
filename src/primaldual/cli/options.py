"""Options of commands that train, and their values as they are typed, to what the library takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

Seeds = Annotated[int, typer.Option(min=1, help="Seeds 0, 1, … of every run, trained together.")]
Epochs = Annotated[int | None, typer.Option(min=1, show_default=False, help="To try it out; the report says so.")]
Dtype = Annotated[
    str | None, typer.Option(show_default=False, help="`float32`, `bfloat16` or `float64`; else the recipe's.")
]
Device = Annotated[
    str | None, typer.Option(show_default=False, help="`cpu`, `cuda`, `cuda:1`; else a GPU where there is one.")
]
Threads = Annotated[int, typer.Option(min=1, help="On a CPU; more pay on an idle machine only.")]
Output = Annotated[Path, typer.Option(help="The folder of records, models and checkpoints.")]
OUTPUT = Path("primaldual-runs")
Reports = Annotated[
    Path | None, typer.Option(show_default=False, help="The folder for the report; else OUTPUT/reports.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")]
OnlyReport = Annotated[bool, typer.Option("--only-report", help="Train nothing; report what is recorded.")]


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
    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"--device takes cpu, cuda or cuda:N; got {text!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device takes cpu, cuda or cuda:N; got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {text}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device
