"""`primaldual efficiency`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from . import bench
from .main import _escape, _fail
from .main import app as main_app
from .options import Device, Plot, Quick, RecordFile

if TYPE_CHECKING:
    from ..bench.session import Content

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"dimensions": "64,128,256,512", "lengths": "1024,2048,4096,8192", "repeats": 10, "budget": 2.0},
    "cpu": {"dimensions": "32,64,128", "lengths": "512,1024,2048", "repeats": 5, "budget": 2.0},
}
QUICK = {"dimensions": "32,64", "lengths": "256,512", "repeats": 3, "budget": 0.2}
COUNTED = Path("results/counted/efficiency.json")


@main_app.command(
    epilog="**Examples**\n\n- `primaldual efficiency --counted` (no device: formulas alone)"
    "\n\n- `primaldual efficiency --quick --device cpu`\n\n- `primaldual efficiency --dimensions 64 --lengths 4096`",
)
def efficiency(
    ctx: typer.Context,
    dimensions: Annotated[
        str | None, typer.Option(help="Of the model: `64,128,256,512` on CUDA unless given.", show_default=False)
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Of documents: `1024,2048,4096,8192` on CUDA unless given.", show_default=False)
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of documents whose memory is counted and measured.")] = 1,
    timed: Annotated[
        str | None,
        typer.Option(help="Dimensions at which what is fused is measured: 64, or the first one.", show_default=False),
    ] = None,
    counted: Annotated[bool, typer.Option("--counted", help="Only the closed forms, for a GPU; no device.")] = False,
    output: RecordFile = None,
    plot: Plot = True,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds: 10 on CUDA, 5 on a CPU unless given.", show_default=False)
    ] = None,
    quick: Quick = False,
    device: Device = None,
) -> None:
    """FLOPs, memory and time of scaled heads over those of softmax and sparse attention, on the Retrieval model.

    By dimension and length, for a training step and for inference, as in the paper's figures: counted in closed form
    and measured, with every score in memory (the paper's time) and fused (today). The table shows the point that the
    paper states beside both; `docs/efficiency.md` says what is counted.

    What is timed are steps of as many tokens as the task's batch has, 32 pairs of 4096 (on a CPU a pair), all
    mechanisms in turns.
    """
    from ..bench.efficiency import measure, stated, table

    try:
        where = torch.device("cpu") if counted else bench.pick_device(device)
        kind = "cuda" if counted or where.type == "cuda" else "cpu"
        settings = DEFAULTS[kind] | (QUICK if quick else {})
        sizes = bench.parts("--dimensions", dimensions or settings["dimensions"], bench.count_of)
        timed = timed or str(stated.POINT[0] if stated.POINT[0] in sizes else sizes[0])
        fused = bench.parts("--timed", timed, bench.count_of)
        if odd := [d for d in (*sizes, *fused) if d % 2]:
            raise ValueError(f"dimensions must be even, for two heads; got {odd[0]}")
        cells = measure.cells(
            sizes, bench.parts("--lengths", lengths or settings["lengths"], bench.count_of), fused, pairs=pairs,
            counted_only=counted, device="cuda" if kind == "cuda" else "cpu",
        )  # fmt: skip
    except ValueError as error:
        raise _fail(error, 2) from None
    runner = measure.EfficiencyBench(where, repeats or settings["repeats"], settings["budget"])
    bench.measure_and_show(
        ctx, cells, runner.measure, where, (output or COUNTED) if counted else output,
        describe=lambda cell: (
            f"{cell.subject}, {cell.setting.attention}, {cell.setting.step}, "
            f"{cell.setting.dimension} × {cell.setting.length}"
        ),
        tables=table.tables, legend=_legend, summary=stated.summary,
        picture=("efficiency.figures", "figures") if plot else None,
    )  # fmt: skip


def _legend(content: Content) -> str:
    """What could not be measured, and what the columns mean."""
    from ..bench.efficiency.table import LEGEND, errors

    return "\n".join([*(f"[yellow]note:[/] {_escape(line)}" for line in errors(content)), LEGEND])
