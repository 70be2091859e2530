"""The demo from start to end."""

from __future__ import annotations

import json
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from ..dual import derive
from ..primal import mechanism
from .checks import TOLERANCE, check
from .data import Data, load
from .environment import environment
from .extras import extra
from .output import check_folder, write_all
from .pool import Pool, one_thread
from .recipe import Recipe, family
from .results import Results
from .terminal import progress_bar
from .train import Job

RESERVE = 12.0
"""Seconds kept back from the budget for the figures and the page."""


def run_demo(output: Path, recipe: Recipe, *, force: bool = False, console: Console | None = None) -> Results:
    """Derive, check and train the four mechanisms, then write the report into `output`.

    Raises:
        DemoError: an extra is missing, the folder is taken, or a mechanism disagrees with its reference.
    """
    begin = time.monotonic()
    console = console or Console()
    check_folder(output, force)
    for module in ("matplotlib", "aeon"):
        extra(module)
    data = load()
    results = _start(recipe, data)
    with one_thread():
        for name, expansion in results.expansions.items():
            results.checks += check(name, expansion.primal, data, recipe)
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
    record = json.dumps(results.to_dict(), indent=1, ensure_ascii=False)
    # the report comes last: where there is one, the rest is there too
    write_all(output, {"results.json": record.encode(), "heads.png": figures.picture, "report.html": html.encode()})
    return results


def _start(recipe: Recipe, data: Data) -> Results:
    called = Path(sys.argv[0])
    from_shell = called.stem == "primaldual" or called.match("primaldual/__main__.py")
    return Results(
        recipe=recipe,
        command=shlex.join(["primaldual", *sys.argv[1:]]) if from_shell else "primaldual.demo.run_demo(...)",
        data_sha256=data.sha256(),
        length=data.train.shape[1],
        classes=data.classes,
        expansions={name: derive(primal) for name, primal in family().items()},
        started=datetime.now(UTC),
        environment=environment(),
    )


def _train(results: Results, data: Data, console: Console, begin: float) -> None:
    """In rounds of one seed for every mechanism, so that all end with equally many runs; then the sweep over β."""
    recipe = results.recipe
    rounds = [[Job(n, e.primal, seed) for n, e in results.expansions.items()] for seed in range(recipe.seeds)]
    sweep = [
        [Job("bn", mechanism("bn", beta=beta), seed) for beta in recipe.sweep]
        for seed in range(min(recipe.sweep_seeds, recipe.seeds))
    ]

    def left() -> float:
        return begin + recipe.budget - RESERVE - time.monotonic()

    with Pool(data, recipe) as pool, progress_bar(console) as progress:
        results.environment["worker processes"] = pool.workers
        task = progress.add_task("training", total=sum(map(len, rounds + sweep)))
        results.runs += pool.rounds(rounds, left, lambda: progress.advance(task))
        progress.update(task, description="β sweep")
        results.sweep += pool.rounds(sweep, left, lambda: progress.advance(task))
        progress.update(task, total=len(results.runs) + len(results.sweep))
    for what, asked, done in (
        ("mechanism", len(rounds), len(results.runs) // len(rounds[0])),
        ("β of the sweep", len(sweep), len(results.sweep) // max(1, len(recipe.sweep))),
    ):
        if done < asked:
            results.notes.append(
                f"{done} of {asked} seeds were run for each {what}: "
                f"the time budget of {recipe.budget:.0f} s was used up"
            )
