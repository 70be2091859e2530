"""What `primaldual data` shows of long sequences, and how it prepares them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..base.terminal import titled
from .main import _escape, console

if TYPE_CHECKING:
    from ..data.sequences import SequenceSet
    from ..data.sequences.chunks import Progress as Report


def is_of_sequences(name: str) -> bool:
    """Whether a name is that of long sequences, or was meant to be."""
    from ..data.sequences import known

    return name.startswith("lra-") or f"lra-{name}" in known()


def sequences_table(store: Path, directory: Path | None) -> Table:
    """A line per set, with where it is."""
    from ..data.sequences import known
    from ..data.sequences.catalogue import names_in
    from ..data.sequences.store import stored_names

    cached, found = stored_names(store), names_in(directory) if directory else []
    table = titled("long sequences of the Long Range Arena")
    table.add_column("set", style="bold cyan", no_wrap=True)
    for heading in ("cases", "length", "classes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    for name, entry in known().items():
        places = {"cache": name in cached, "data": name in found}
        here = ", ".join(place for place, there in places.items() if there)
        otherwise = "to generate" if entry.generated else "–"
        cases = "+".join(map(str, entry.cases)) if entry.cases else "–"
        table.add_row(name, cases, str(entry.length), str(entry.classes), here or f"[dim]{otherwise}[/]")
    return table


def prepare_sequences(
    name: str, data_dir: Path | None, cache_dir: Path | None, check: bool, rebuild: bool, processes: int | None
) -> SequenceSet:
    """The set, with a bar for as long as it is generated."""
    from ..data.sequences import load

    with _bar(name) as progress:
        return load(
            name, data_dir, cache_dir=cache_dir, check=check, rebuild=rebuild, processes=processes, progress=progress
        )


def sequences_line(data: SequenceSet) -> str:
    """A set in short."""
    cases = " + ".join(str(len(part)) for part in data.parts.values())
    what, longest = "pairs of sequences" if data.pairs else "sequences", data.documents.lengths.max()
    return _escape(f"{data.name}: {cases} {what} of up to {longest} tokens, {len(data.classes)} classes")


def sequences_info(
    name: str, data_dir: Path | None, cache_dir: Path | None, check: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """What a set holds, and its notes. It is prepared if it is read from files; one that is generated must be there."""
    from ..base.cache import cache_directory
    from ..data import DataNotFoundError
    from ..data.sequences import load
    from ..data.sequences.catalogue import entry
    from ..data.sequences.store import read, set_folder, size

    generated, folder = entry(name).generated, set_folder(name, cache_directory(cache_dir))
    if generated and not folder.exists():
        raise DataNotFoundError(f"{name} is not prepared; primaldual data prepare {name} generates it")
    data = read(folder) if generated else load(name, data_dir, cache_dir=cache_dir, check=check)
    words = {"train": "training", "validation": "validation", "test": "test"}
    lengths, counts = data.documents.lengths, np.bincount(data.parts["train"].labels, minlength=len(data.classes))
    spread = f"{lengths.min()} to {lengths.max()} tokens, mean {lengths.mean():.0f} ± {lengths.std():.0f}"
    rows = {
        "title": data.title,
        "cases": ", ".join(f"{len(cases)} {words[part]}" for part, cases in data.parts.items()),
        "documents": f"{len(data.documents)}{', in pairs' if data.pairs else ''}: {spread}",
        "length": f"{data.length} after padding",
        "vocabulary": f"{data.vocabulary} ids",
        "classes": ", ".join(f"{c} ({n})" for c, n in zip(data.classes, counts, strict=True)),
        "kept in": f"{folder}, {size(folder) / 1e6:.1f} MB",
        "from": data.origin,
        "hash": data.hash,
    }
    return rows, data.notes


@contextmanager
def _bar(name: str) -> Iterator[Report]:
    """What is to be called with how many cases are done; nothing is shown until then."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(TextColumn(name), *columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def report(done: int, total: int) -> None:
            task = bars.task_ids[0] if bars.task_ids else bars.add_task(name)
            bars.update(task, completed=done, total=total)

        yield report
