"""`primaldual bench regression`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..base.packages import MissingPackageError
from . import bench
from .main import _fail
from .options import Device, RecordFile


@bench.app.command(epilog="**Examples**\n\n- `primaldual bench regression --device cpu`")
def regression(
    ctx: typer.Context,
    sample: Annotated[int, typer.Option(min=1, max=64, help="Outputs per head that scikit-learn is timed on.")] = 4,
    output: RecordFile = None,
    device: Device = None,
) -> None:
    """Measure the regressions behind a layer, all at once, against a loop over scikit-learn's SVR.

    8 heads × 64 outputs on 512 keys. Exit status 1 if a ratio is over its bound.
    """
    from ..bench import regression as module

    try:
        where = bench.pick_device(device)
        runner = module.RegressionBench(where, sample=sample)
    except ValueError as error:
        raise _fail(error, 2) from None
    except MissingPackageError as error:
        raise _fail(error, 1) from None
    bench.measure_and_show(
        ctx, module.CASES, runner.measure, where, output,
        describe=lambda case: f"{case.name}, head dim {case.head_dim}",
        tables=lambda content: [module.results_table(content)], legend=lambda content: module.LEGEND,
        summary=module.verdicts, targets_bind=True,
    )  # fmt: skip
