"""The demo from start to end."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from ..base.environment import environment
from ..base.packages import needed
from ..base.threads import on_threads
from ..data import DataNotFoundError, Dataset, load
from ..dual import derive
from ..primal import Primal, mechanism
from ..training import Recipe
from .checks import TOLERANCE, check
from .members import Member, train_members
from .output import check_folder, write_all
from .results import Results
from .settings import DATASET, DemoError, Settings, family
from .terminal import Bar, progress_bar

RESERVE = 12.0
"""Seconds kept back from the budget for the figures and the page."""

PLANNED = 0.75
"""Share of the time left that is planned with, as other work may slow the machine down."""


def run_demo(output: Path, settings: Settings, *, force: bool = False, console: Console | None = None) -> Results:
    """Derive, check and train the four mechanisms, then write the report into `output`.

    Raises:
        DemoError: the folder is taken, the data are not there, or a mechanism disagrees with its reference.
        MissingPackageError: matplotlib is not installed.
    """
    begin = time.monotonic()
    console = console or Console()
    check_folder(output, force)
    needed("matplotlib", "matplotlib", "the demo", '"primaldual[demo]"')
    try:
        data = load(DATASET, offline=True)
    except DataNotFoundError as error:
        where = f'{DATASET}, which aeon ships (pip install "primaldual[demo]")'
        raise DemoError(f"the demo needs {where}: {error}") from None
    results = _start(settings, data)
    with on_threads(1):
        for name, expansion in results.expansions.items():
            results.checks += check(name, expansion.primal, data, settings.recipe)
        worst = max(max(one.output, one.gradient) for one in results.checks)
        console.print(
            f"{len(results.expansions)} mechanisms derived; outputs and gradients equal the reference's "
            f"to {worst:.0e} (float64, limit {TOLERANCE:.0e})"
        )
        _train(results, data, console, begin)
    # matplotlib takes a second to import, and is not needed before
    from .figures import draw
    from .page import page

    figures = draw(results)
    results.seconds = time.monotonic() - begin
    html = page(results, figures)
    record = json.dumps(results.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    # the report comes last: where there is one, the rest is there too
    write_all(output, {"results.json": record.encode(), "heads.png": figures.picture, "report.html": html.encode()})
    return results


def _start(settings: Settings, data: Dataset) -> Results:
    called = Path(sys.argv[0])
    from_shell = called.stem == "primaldual" or called.match("primaldual/__main__.py")
    load_before = f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
    return Results(
        settings=settings,
        command=shlex.join(["primaldual", *sys.argv[1:]]) if from_shell else "primaldual.demo.run_demo(...)",
        data=data,
        expansions={name: derive(primal) for name, primal in family().items()},
        started=datetime.now(UTC),
        environment=environment(torch.device("cpu")) | {"load before": load_before},
    )


def _train(results: Results, data: Dataset, console: Console, begin: float) -> None:
    """One seed of every mechanism first, which tells how many more there is time for; then those; then the sweep."""
    settings = results.settings
    mechanisms = [(name, expansion.primal) for name, expansion in results.expansions.items()]
    betas = [("bn", mechanism("bn", beta=beta)) for beta in settings.sweep]
    most = {"mechanism": settings.seeds, "β of the sweep": min(settings.sweep_seeds, settings.seeds) if betas else 0}
    with progress_bar(console, len(mechanisms) * settings.seeds + len(betas) * most["β of the sweep"]) as bar:
        trainer = _Trainer(data, settings.recipe, begin + settings.budget - RESERVE, bar)
        results.members += trainer.train(mechanisms, range(1))
        seeds = 1 + trainer.seeds_in_time(settings.seeds - 1, len(mechanisms))
        results.members += trainer.train(mechanisms, range(1, seeds))
        sweep_seeds = trainer.seeds_in_time(min(most["β of the sweep"], seeds), len(betas))
        results.sweep += trainer.train(betas, range(sweep_seeds))
    for what, trained in zip(most, (seeds, sweep_seeds), strict=True):
        if trained < most[what]:
            results.notes.append(
                f"{trained} of {most[what]} seeds were trained for each {what}: there was no time for more within "
                f"{settings.budget:.0f} s"
            )


class _Trainer:
    """Trains members, and says for how many more there is time until `end`, in seconds of the monotonic clock."""

    def __init__(self, data: Dataset, recipe: Recipe, end: float, bar: Bar) -> None:
        self.data, self.recipe, self.end, self.bar = data, recipe, end, bar
        self.seconds, self.members = 0.0, 0  # so far

    def train(self, mechanisms: Sequence[tuple[str, Primal]], seeds: range) -> list[Member]:
        """All seeds of a mechanism at once, one mechanism after the other."""
        start, found = time.monotonic(), list[Member]()
        for name, primal in mechanisms if seeds else ():
            found += train_members(name, primal, self.data, self.recipe, seeds, self.bar.watch(name, len(seeds)))
        self.seconds, self.members = self.seconds + time.monotonic() - start, self.members + len(found)
        return found

    def seeds_in_time(self, wanted: int, mechanisms: int) -> int:
        """How many of the seeds that are wanted can be trained for so many mechanisms, going by those so far."""
        members = PLANNED * (self.end - time.monotonic()) * self.members / self.seconds
        return wanted if members >= wanted * mechanisms else max(0, int(members / mechanisms))
