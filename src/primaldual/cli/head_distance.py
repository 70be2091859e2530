"""`primaldual reproduce table-head-distance`: of the models that `table-lra` trains on Retrieval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.files import write_json
from .jobs import end, one_line_errors, say, show, train, write_texts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..paper import Engine, Job

PAIRS = 8
"""Pairs of documents of the test part that the heads are looked at on."""


def reproduce(
    part: Mapping[str, Any], output: Path, reports: Path | None, engine: Engine, device: torch.device, threads: int,
    data_dir: Path | None, offline: bool, *, dry_run: bool, only_report: bool,
) -> None:  # fmt: skip
    """Train what is missing, look at the heads of every seed's model, and write the report and its figures as JSON."""
    from ..paper import jobs, recorded
    from ..paper.families import LONG
    from ..paper.head_distance import LEGEND, NAME, PAPER, measured
    from ..training import SequenceTask, Store

    with one_line_errors(2):
        sets = part["only"] or ["lra-retrieval"]
        if len(sets) != 1:
            raise ValueError(f"{NAME} is of one set; --only takes lra-retrieval or lra-retrieval-manpages, got {sets}")
        wanted = jobs("table-lra", **{**part, "only": sets, "mechanisms": part["mechanisms"] or list(PAPER)})
    failures = train(
        wanted, output, engine, str(device), threads, data_dir, offline, dry_run=dry_run, only_report=only_report
    )
    with one_line_errors(1):
        store = Store(output)
        found = recorded(wanted, store.records())
        data = LONG.load(sets[0], data_dir, offline)

        def models(job: Job) -> Iterator[nn.Module]:
            for record in found[job].values():
                if record.failure is None:
                    yield store.model(record.key).to(device)

        task = SequenceTask.of(data, wanted[0].primal, wanted[0].recipe)
        lengths = task.lengths("test")
        longest = None if lengths is None else int(lengths[:PAIRS].max())
        tokens, padding, _ = task.take(task.parts["test"], slice(PAIRS), longest)
        batch = tuple(None if x is None else x.to(device) for x in (tokens, padding))
        say(f"looking at the heads on {PAIRS} pairs of documents of {data.title}")
        notes = [f"no trained model of {job.mechanism} is in {output}" for job in wanted if not found[job]]
        table = measured({job.mechanism: models(job) for job in wanted if found[job]}, batch, data.title, notes)
        if not table.found:
            raise ValueError(f"{output} has no trained model of {sets[0]}; leave out --only-report to train them")
        folder = reports or output / "reports"
        texts = {"md": table.markdown(), "csv": table.csv(), "tex": table.latex()}
        written = write_texts(folder, NAME, texts)
        write_json(folder / f"{NAME}.json", table.to_dict())
    show(table.grids(), (), table.notes, LEGEND)
    end([*written, folder / f"{NAME}.json"], failures, measured=True)
