"""`primaldual train NAME`, `primaldual train FILE.ts`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from ..base.spread import spread_text
from ..base.threads import on_threads
from ..primal import Primal
from .jobs import one_line_errors
from .main import _escape, _fail, app, console, errors
from .mechanism_options import mechanism_option, with_mechanism_options
from .options import OUTPUT, DataDir, Device, Output, Threads, device_option

if TYPE_CHECKING:
    from ..data import Dataset
    from ..training import Recipe, Record


@app.command(
    epilog="**Examples**\n\n- `primaldual train JapaneseVowels --mechanism bn+sh`"
    "\n\n- `primaldual train Mine_TRAIN.ts --mechanism bn --beta 0.6 --seeds 5`"
    "\n\n- `primaldual train BasicMotions --mechanism bn+sh --tune --trials 30`"
)
@with_mechanism_options
def train(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE.ts",
            show_default=False,
            help="A set of `primaldual data list`, or a file; `…_TEST.ts` beside `…_TRAIN.ts` is the test set. "
            "Targets of a file are standardised for training.",
        ),
    ],
    *,
    mechanism_name: Annotated[
        str, typer.Option("--mechanism", help="One of `primaldual mechanisms`; settings as in `primaldual explain`.")
    ] = "softmax",
    settings: dict[str, Any],
    seeds: Annotated[int, typer.Option(min=1, help="So many models, with seeds 0, 1, …, train together.")] = 1,
    epochs: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Else the recipe's, 40 at most.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, show_default=False, help="Else the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", show_default=False, help="Else the recipe's.")] = None,
    encoder: Annotated[
        str | None, typer.Option(show_default=False, help="`mvts` or `flowformer`; else as the paper's for this set.")
    ] = None,
    validation: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the training set that is held out to choose the epoch by.")
    ] = 0.0,
    patience: Annotated[int, typer.Option(min=0, help="With validation: epochs without progress; 0: never stop.")] = 0,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="`float32`, `bfloat16` or `float64`.")] = "float32",
    threads: Threads = 1,
    output: Output = OUTPUT,
    data_dir: DataDir = None,
    resume: Annotated[bool, typer.Option(help="Go on with a run that was interrupted.")] = True,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write curves to OUTPUT/tensorboard.")] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="First search β and scales on a share of the training set (Optuna).")
    ] = False,
    trials: Annotated[int, typer.Option(min=1, help="With --tune: how many.")] = 20,
) -> None:
    """Train time-series models on a data set, and say how good they are on its test set.

    All seeds train at once. Records, trained models and checkpoints go to the output folder; the same command run
    again goes on where it was interrupted, and a finished run is not run again. Sizes and training are those of the
    paper's code bases, but for what takes hours on a CPU: there is no dropout on the attention weights, and there are
    at most 40 epochs unless --epochs says otherwise; `primaldual reproduce` trains as the paper did.
    """
    from ..data import load, load_files
    from ..paper import recipe_for
    from ..training import MissingPackageError, SeriesTask, check, in_minutes

    with one_line_errors(2):
        primal = mechanism_option(mechanism_name, settings)
        chosen = device_option(device)
    with one_line_errors(1):
        data = load_files(name).standardised() if name.endswith(".ts") else load(name, data_dir)
    for note in data.notes:
        console.print(_escape(note), style="dim", highlight=False, soft_wrap=True)
    try:
        recipe = in_minutes(recipe_for(data, encoder))
        changes: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "learning_rate": lr}
        recipe = replace(
            recipe, dtype=dtype, validation=validation, patience=patience,
            **{key: value for key, value in changes.items() if value is not None},
        )  # fmt: skip
        task = SeriesTask.of(data, primal, recipe)
        check(task, recipe)
        primal.training_set.head_scales(task.config.heads)
        with on_threads(threads):
            if tune:
                primal = _tuned(data, primal, recipe, seeds, output, trials, chosen)
            records = _trained(data, primal, recipe, seeds, output, chosen, resume, tensorboard, mechanism_name)
    except ValueError as error:
        raise _fail(error, 2) from None
    except (MissingPackageError, OSError) as error:
        raise _fail(error, 1) from None
    except torch.OutOfMemoryError:
        raise _fail("the device is out of memory; give a smaller --batch-size or fewer --seeds", 1) from None
    except KeyboardInterrupt:
        raise _fail("stopped; the same command goes on from the last checkpoint", 130) from None
    _print(records, mechanism_name, output, own=name.endswith(".ts"))
    if all(record.failure for record in records):
        raise typer.Exit(1)


def _trained(
    data: Dataset, primal: Primal, recipe: Recipe, seeds: int, output: Path, device: torch.device, resume: bool,
    curves: bool, title: str,
) -> list[Record]:  # fmt: skip
    from ..training import SeriesTask, csv_log, key, progress_bar, tensorboard
    from ..training import train as run

    name = key(SeriesTask.of(data, primal, recipe), recipe, *range(seeds))
    with ExitStack() as stack:
        watch = [stack.enter_context(progress_bar(errors, f"{data.name}, {title}"))]
        watch.append(csv_log(output / "logs" / f"{name}.csv"))
        if curves:
            watch.append(stack.enter_context(tensorboard(output / "tensorboard" / name)))
        return run(data, primal, recipe, range(seeds), folder=output, device=device, resume=resume, watch=watch)


def _tuned(
    data: Dataset, primal: Primal, recipe: Recipe, seeds: int, output: Path, trials: int, device: torch.device
) -> Primal:
    from ..training.tuning import tune

    def said(number: int, settings: dict[str, Any], value: float) -> None:
        words = ", ".join(f"{name} {setting:g}" for name, setting in settings.items())
        console.print(f"trial {number}: {words}: validation {value:.4g}", highlight=False)

    found = tune(data, primal, recipe, range(seeds), folder=output / "tune", trials=trials, device=device, watch=said)
    words = ", ".join(f"{name} {setting:g}" for name, setting in found.settings.items())
    console.print(f"best of {found.trials} trials: {words}; now on the whole training set", highlight=False)
    return found.primal


def _print(records: list[Record], title: str, output: Path, own: bool) -> None:
    """A line per seed. Of one's own data nothing is shown that was chosen on the test set."""
    first = records[0]
    unit = "accuracy, %" if first.metric == "accuracy" else "RMSE"
    tested = bool(first.data["test"])
    chosen = ["selected"] if any(record.selected for record in records) else []
    kinds = ["validation"] if not tested else [*chosen, "last"] if own else ["best", "last", *chosen]
    unit = f"test {unit}" if tested else unit
    table = Table(title=_escape(f"{first.data['name']}, {title}: {unit}"), title_style="italic", box=box.SIMPLE_HEAD)
    for heading in ("seed", *kinds):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for record in records:
        scores = [None if record.failure else getattr(record, kind) for kind in kinds]
        cells = ["–" if score is None else f"{score.value:.2f} [dim]({record.unit} {score.at})[/]" for score in scores]
        table.add_row(str(record.seed), *cells, f"[red]{_escape(record.failure)}[/]" if record.failure else "")
    if len(records) > 1:
        table.add_section()
        table.add_row("mean ± std", *(_spread(records, kind) for kind in kinds), "")
    console.print(table)
    words = {
        "best": "best: of all epochs, chosen on the test set, as the paper's code bases do.",
        "last": "last: after the last epoch, nothing chosen.",
        "selected": "selected: of all epochs, by the validation share.",
    }
    legend = " ".join(words[kind] for kind in kinds if kind in words)
    if not tested:
        legend = "validation: the best of all epochs, on the share of the training set that is held out."
        hint = "" if first.validation else ", or hold out a share of the training set by --validation"
        console.print(
            f"[yellow]note:[/] there are no test series; call the files …_TRAIN.ts and …_TEST.ts{hint}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    console.print(legend, style="dim", highlight=False)
    console.print(
        f"{max(record.seconds for record in records):.0f} s of training. Records: {_escape(str(output.resolve()))}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _spread(records: list[Record], kind: str) -> str:
    """Over the seeds that came to such a score, and to their end."""
    ended = [getattr(record, kind) for record in records if not record.failure]
    return spread_text([score.value for score in ended if score], len(records))
