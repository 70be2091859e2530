"""`primaldual bench training`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.suggestions import did_you_mean
from . import bench
from .main import _escape, _fail
from .options import Device, Mechanisms, Plot, Quick, RecordFile, Repeats

if TYPE_CHECKING:
    from ..bench.session import Content
    from ..bench.training_case import TrainingCase

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"seeds": 5, "dtype": "bfloat16", "impl": "auto,sdpa", "batch": None, "steps": None, "repeats": 30},
    "cpu": {"seeds": 2, "dtype": "float32", "impl": "auto", "batch": 8, "steps": 64, "repeats": 7},
}
QUICK_SETS = "SpokenArabicDigits,Heartbeat"
SETS = f"{QUICK_SETS},SelfRegulationSCP1,EthanolConcentration"
TARGET_OPTIONS = {"output", "plot", "repeats", "device"}
"""What may be given beside the defaults without a target ceasing to be one."""


@bench.app.command(
    epilog="**Examples**\n\n- `primaldual bench training` (on an H200 exit status 1 if a target is missed)"
    "\n\n- `primaldual bench training --only PEMS-SF,JapaneseVowels --mechanisms softmax,bn+sh --seeds 3`"
    "\n\n- `primaldual bench training --quick --device cpu`"
)
def training(
    ctx: typer.Context,
    only: Annotated[
        str | None, typer.Option(metavar="SET,SET", help="Sets of known size instead of four.", show_default=False)
    ] = None,
    mechanisms: Mechanisms = "softmax",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Members: 5 on CUDA, 2 on a CPU unless given.", show_default=False)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Series per step: the recipe's, 8 on a CPU unless given.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Where series are cut: nowhere, 64 on a CPU unless given.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="`bfloat16` (on CUDA unless given) or `float32`.", show_default=False)
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(help="Executors of the attention: `auto,sdpa` on CUDA, `auto` on a CPU.", show_default=False),
    ] = None,
    output: RecordFile = None,
    plot: Plot = True,
    repeats: Repeats = None,
    quick: Quick = False,
    device: Device = None,
) -> None:
    """Measure the training step of the paper's time-series models, per seed, with all seeds together.

    Model, batch and dropout are the recipe's for each set; series are random, of the published sizes and, where the
    archive's are, of unequal lengths. In turns with it runs what people would do instead: one model at a time in a
    plain torch loop. On a CPU batches and series are small, so that it ends in seconds; the table says what was run.

    Time is that of device events on CUDA, after a warm-up, and of the wall clock on a CPU. Peak memory (CUDA) is the
    most that was allocated since before the models were built, the series included, divided by the seeds.
    """
    from ..bench import training_targets as targets
    from ..bench.training import TrainingBench

    try:
        where = bench.pick_device(device)
        settings = DEFAULTS[where.type]
        cases = _cases(
            only or (QUICK_SETS if quick else SETS), mechanisms, impl or settings["impl"], dtype or settings["dtype"],
            seeds or settings["seeds"], batch or settings["batch"], steps or settings["steps"],
        )  # fmt: skip
    except ValueError as error:
        raise _fail(error, 2) from None
    runner = TrainingBench(where, repeats or (3 if quick else settings["repeats"]), budget=0.5 if quick else 5.0)
    bench.measure_and_show(
        ctx, cases, runner.measure, where, output,
        describe=lambda case: f"{case.dataset}, {case.mechanism}, {case.impl}",
        tables=lambda content: (
            targets.results_tables(content) + ([targets.targets_table(content)] if content["targets"] else [])
        ),
        legend=_legend, summary=targets.verdicts, picture=("training_plot", "training_plot") if plot else None,
        targets_bind={name for name, *_ in bench.typed(ctx)} <= TARGET_OPTIONS,
    )  # fmt: skip


def _legend(content: Content) -> str:
    """What could not be measured, and what the columns mean."""
    from ..bench.training_targets import LEGEND

    refused = [f"{r['dataset']}, {r['mechanism']}, {r['impl']}: {r['error']}" for r in content["records"] if r["error"]]
    return "\n".join([*(f"[yellow]note:[/] {_escape(line)}" for line in refused), LEGEND])


def _cases(
    only: str, mechanisms: str, impl: str, dtype: str, seeds: int, batch: int | None, steps: int | None
) -> list[TrainingCase]:
    """The cases that the options ask for; a ValueError says what is wrong with them."""
    from ..bench.long_case import LongCase
    from ..bench.training_case import TrainingCase
    from ..data import manifest, sequences
    from ..ops import EXECUTORS

    sets, names, impls = (bench.parts("", text, str) for text in (only, mechanisms, impl))
    for option, chosen, known in (
        ("--only", sets, (*manifest(), *sequences.known())),
        ("--impl", impls, ("auto", *EXECUTORS)),
        ("--dtype", (dtype := bench.SHORT.get(dtype, dtype),), ("bfloat16", "float32")),
    ):
        for wrong in (one for one in chosen if one not in known):
            raise ValueError(f"{option} takes {', '.join(known)}; got {wrong!r}{did_you_mean(wrong, known)}")
    cases = [
        (LongCase if name in sequences.known() else TrainingCase)(name, column, executor, seeds, dtype, batch, steps)
        for column in names
        for name in sets
        for executor in impls
    ]
    if not cases:
        raise ValueError("nothing to measure: --only, --mechanisms and --impl each need a name")
    for case in cases:
        case.config()  # raises where there is no such model
    return cases
