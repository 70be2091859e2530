"""What `primaldual data` shows of text to model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..base.terminal import titled
from .main import _escape

if TYPE_CHECKING:
    from ..data.text import TextSet


def is_of_text(name: str, store: Path | None = None) -> bool:
    """Whether a name is that of a text, or was meant to be, or is kept as one."""
    from ..data.text.store import stored_names

    return name.startswith("text-") or (store is not None and name in stored_names(store))


def text_table(store: Path, directory: Path | None) -> Table:
    """A line per text with a name, and for each that is kept."""
    from ..data.text.loading import KNOWN, names_in
    from ..data.text.store import stored_names

    cached, found = stored_names(store), names_in(directory) if directory else []
    table = titled("text to model")
    table.add_column("text", style="bold cyan", no_wrap=True)
    table.add_column("documents", justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    for name in dict.fromkeys((*KNOWN, *cached)):
        here = ", ".join(place for place, there in {"cache": name in cached, "data": name in found}.items() if there)
        documents = "+".join(map(str, KNOWN[name])) if name in KNOWN else ""
        table.add_row(_escape(name), documents, here or "[dim]–[/]")
    return table


def text_line(data: TextSet) -> str:
    """A text in short."""
    documents = " + ".join(str(part.documents) for part in data.parts.values())
    size = " + ".join(f"{part.bytes / 1e6:.1f}" for part in data.parts.values())
    return _escape(f"{data.name}: {documents} documents of {size} MB, {len(data.tokens)} tokens ({data.tokenizer})")


def text_info(
    name: str, data_dir: Path | None, cache_dir: Path | None, check: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """What a text holds, and its notes."""
    from ..base.cache import cache_directory
    from ..data.text import load
    from ..data.text.store import read, stored_names, text_folder

    store = cache_directory(cache_dir)
    kept = name in stored_names(store) and not name.startswith("text-")  # of a file or a folder
    data = read(text_folder(name, store)) if kept else load(name, data_dir, cache_dir=cache_dir, check=check)
    words = {"train": "training", "validation": "validation", "test": "test"}
    rows = {
        "documents": ", ".join(f"{part.documents} {words[name]}" for name, part in data.parts.items()),
        "bytes": ", ".join(f"{part.bytes} {words[name]}" for name, part in data.parts.items()),
        "tokens": f"{len(data.tokens)}, {data.vocabulary} different ones ({data.tokenizer})",
        "kept in": f"{text_folder(name, store)}, {data.tokens.nbytes / 1e6:.1f} MB",
        "from": data.origin,
        "hash": data.hash,
    }
    return rows, data.notes
