"""`primaldual predict MODEL FILE`."""

from __future__ import annotations

import csv
import io
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.files import write_text
from .jobs import one_line_errors
from .main import _escape, app, errors
from .options import Device, device_option

if TYPE_CHECKING:
    import numpy as np

    from ..data.ts import TsFile
    from ..training.predictor import Predictor


@app.command(
    epilog="**Examples**\n\n- `primaldual predict primaldual-runs/models/0123456789abcdef0123.safetensors New.ts`"
    "\n\n- `primaldual predict saved-estimator.safetensors New.ts --output predictions.csv`"
)
def predict(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="What `primaldual train` left in `models/`, or an estimator's `save`.",
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE.ts", show_default=False, help="Series, with labels.")],
    output: Annotated[
        Path | None, typer.Option(show_default=False, help="A CSV file; standard output unless given.")
    ] = None,
    device: Device = None,
) -> None:
    """Predict the class, or the number, of every series of a file.

    A line per series: what is predicted, and the probability of every class. Series are prepared as those were that the
    model was trained on. Where the labels of the file are classes of the model, it is said how many are right.
    """  # fmt: skip
    from ..data.sources import read_file
    from ..training.predictor import Predictor

    with one_line_errors(2):
        chosen = device_option(device)
    with one_line_errors(1):
        predictor = Predictor.load(model)
        read = read_file(file)
        channels = predictor.preparation.mean.shape[0]
        if read.channels != channels:
            raise ValueError(f"{file} has {read.channels} channels, the model takes {channels}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            text, score = _predictions(predictor, read, chosen)
        for one in {str(warning.message) for warning in said}:
            errors.print(f"[yellow]note:[/] {_escape(one)}", highlight=False, soft_wrap=True)
        if output is not None:
            write_text(output, text)
        else:
            sys.stdout.write(text)
    errors.print(f"{len(read.series)} series{score}", highlight=False, soft_wrap=True)


def _predictions(predictor: Predictor, read: TsFile, device: object) -> tuple[str, str]:
    """The CSV, and how good the predictions are where that is known."""
    import torch

    assert isinstance(device, torch.device)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if predictor.classes is None:
        numbers = predictor.numbers(read.series, device, torch.get_num_threads())
        writer.writerow(["series", "predicted"])
        writer.writerows([i, f"{x:.9g}"] for i, x in enumerate(numbers, 1))
        return stream.getvalue(), _error(numbers, read)
    probabilities = predictor.probabilities(read.series, device, torch.get_num_threads())
    names = [str(name) for name in predictor.classes.tolist()]
    found = [names[i] for i in probabilities.argmax(1)]
    writer.writerow(["series", "predicted", *names])
    writer.writerows(
        [i, name, *(f"{p:.6f}" for p in row)] for i, (name, row) in enumerate(zip(found, probabilities, strict=True), 1)
    )
    return stream.getvalue(), _accuracy(found, names, read)


def _accuracy(found: list[str], names: list[str], read: TsFile) -> str:
    if read.kind != "classification" or not set(read.labels) & {name.lower() for name in names}:
        return ""
    right = sum(one.lower() == label for one, label in zip(found, read.labels, strict=True))
    return f", {right} as they are labelled ({100 * right / len(found):.2f} %)"


def _error(numbers: np.ndarray, read: TsFile) -> str:
    if read.kind != "regression":
        return ""
    squares = [(float(label) - x) ** 2 for x, label in zip(numbers.tolist(), read.labels, strict=True)]
    return f", root mean squared error {(sum(squares) / len(squares)) ** 0.5:.4g}"
