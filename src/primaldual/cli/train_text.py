"""`primaldual train-text FILE|FOLDER|NAME`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

from ..base.spread import spread
from ..base.terminal import titled
from ..base.threads import on_threads
from .jobs import one_line_errors
from .main import _escape, _fail, app, console, errors
from .mechanism_options import mechanism_option, with_mechanism_options
from .options import OUTPUT, DataDir, Device, NoCheck, Output, Threads, device_option

if TYPE_CHECKING:
    from ..training import Recipe, Record, TextTask


@app.command(
    "train-text",
    epilog="**Examples**\n\n- `primaldual train-text LICENSE --size tiny --context 128 --steps 200`"
    "\n\n- `primaldual train-text books/ --mechanism sh --size small --seeds 3`"
    "\n\n- `primaldual train-text text-imdb --data-dir ~/downloads --mechanism qk-norm --size large`"
    "\n\n- `primaldual train-text books/ --tokenizer tokenizer.json --accumulate 4`",
)
@with_mechanism_options
def train_text(
    text: Annotated[
        str,
        typer.Argument(
            metavar="FILE|FOLDER|NAME",
            show_default=False,
            help="A file of text, a folder of .txt, .text, .md and .rst files, or `text-imdb`.",
        ),
    ],
    *,
    mechanism_name: Annotated[
        str,
        typer.Option(
            "--mechanism",
            help="One of `primaldual mechanisms`; settings as in `primaldual explain`, "
            "whose `--size` is `--kernel-size` here.",
        ),
    ] = "softmax",
    settings: dict[str, Any],
    size: Annotated[str, typer.Option(help="`tiny`, `small`, `medium`, `large` or `xlarge`.")] = "small",
    context: Annotated[int | None, typer.Option(min=1, show_default=False, help="Tokens; else the size's.")] = None,
    positions: Annotated[
        str | None, typer.Option(show_default=False, help="`rotary`, `learned` or `none`; else `rotary`.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(show_default=False, help="A file of the tokenizers library; else bytes.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="So many models, with seeds 0, 1, …, one after the other.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, show_default=False, help="Else the recipe's, 1,500.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, show_default=False, help="Windows; else 32.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Parts of a batch, in turn.")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", show_default=False, help="Else the size's.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(min=1, show_default=False, help="Steps; else 100.")] = None,
    device: Device = None,
    dtype: Annotated[str | None, typer.Option(show_default=False, help="Else `bfloat16`, on a CPU `float32`.")] = None,
    threads: Threads = 1,
    output: Output = OUTPUT,
    data_dir: DataDir = None,
    no_check: NoCheck = False,
    resume: Annotated[bool, typer.Option(help="Go on with a run that was interrupted.")] = True,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write curves to OUTPUT/tensorboard.")] = False,
) -> None:
    """Train language models on text, and say how many bits they need for a byte of text that they have not seen.

    A twentieth of the documents is held out for validation, and the test folder of a text, or another twentieth, is the
    test. Records, trained models and checkpoints go to the output folder; the same command run again goes on where it
    was interrupted, and a finished run is not run again.
    """
    from ..data.text import load
    from ..training import TextTask, check, text_recipe

    with one_line_errors(2):
        primal = mechanism_option(mechanism_name, settings)
        chosen = device_option(device)
        changes = {
            "context": context, "positions": positions, "steps": steps, "batch_size": batch_size,
            "accumulate": accumulate, "learning_rate": lr, "evaluate_every": evaluate_every,
            "dtype": dtype or ("float32" if chosen.type == "cpu" else "bfloat16"),
        }  # fmt: skip
        recipe = text_recipe(size, **{name: value for name, value in changes.items() if value is not None})
    with one_line_errors(1):
        data = load(text, data_dir, tokenizer=tokenizer, check=not no_check)
    for note in data.notes:
        console.print(_escape(note), style="dim", highlight=False, soft_wrap=True)
    try:
        task = TextTask.of(data, primal, recipe)
        check(task, recipe)
        with on_threads(threads):
            records = _trained(task, recipe, seeds, output, chosen, resume, tensorboard, mechanism_name)
    except ValueError as error:
        raise _fail(error, 2) from None
    except (ModuleNotFoundError, OSError) as error:
        raise _fail(error, 1) from None
    except torch.OutOfMemoryError:
        raise _fail("the device is out of memory; give --accumulate 2, or more", 1) from None
    except KeyboardInterrupt:
        raise _fail("stopped; the same command goes on from the last checkpoint", 130) from None
    _print(records, f"{data.name}, {mechanism_name}, {size}", output)
    if all(record.failure for record in records):
        raise typer.Exit(1)


def _trained(
    task: TextTask, recipe: Recipe, seeds: int, output: Path, device: torch.device, resume: bool, curves: bool,
    title: str,
) -> list[Record]:  # fmt: skip
    """One seed after the other: a model fills the device, and what a kill may cost is one checkpoint of one model."""
    from ..training import key, progress_bar, tensorboard, train

    records = []
    for seed in range(seeds):
        with ExitStack() as stack:
            watch = [stack.enter_context(progress_bar(errors, f"{task.name}, {title}, seed {seed}"))]
            if curves:
                watch.append(stack.enter_context(tensorboard(output / "tensorboard" / key(task, recipe, seed))))
            records += train(
                task, recipe=recipe, seeds=[seed], folder=output, device=device, resume=resume, watch=watch
            )
    return records


def _print(records: list[Record], title: str, output: Path) -> None:
    first = records[0]
    table = titled(f"{title}: bits per byte")
    kinds = {"validation": "validation, best", "selected": "test, selected", "last": "test, last"}
    for heading in ("seed", *kinds.values(), "tokens / s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for record in records:
        scores = [getattr(record, kind) for kind in kinds]
        cells = ["–" if score is None else f"{score.value:.4f} [dim](step {score.at})[/]" for score in scores]
        fast = record.speed.get("tokens_per_second")
        failure = f"[red]{_escape(record.failure)}[/]" if record.failure else ""
        table.add_row(str(record.seed), *cells, "–" if fast is None else f"{fast:,.0f}", failure)
    if len(records) > 1:
        _add_means(table, records, tuple(kinds))
    console.print(table)
    flops = first.task["flops_per_token"]["training"]
    console.print(
        f"{first.parameters:,} parameters, {flops / 1e6:,.1f} million FLOPs for a token of training. selected: the "
        f"weights that did best on validation. Every token is predicted once, in windows side by side.",
        style="dim", highlight=False,
    )  # fmt: skip
    console.print(
        f"{sum(record.seconds for record in records):.0f} s of training. Records: {_escape(str(output.resolve()))}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _add_means(table: Table, records: list[Record], kinds: tuple[str, ...]) -> None:
    scores = [[s.value for s in (getattr(record, kind) for record in records) if s] for kind in kinds]
    table.add_section()
    table.add_row("mean ± std", *(spread(values).text(4) if values else "–" for values in scores), "", "")
