"""Pathfinder: are two markers on one snake? Pictures of two long dashed snakes, among short ones, of 32 x 32 pixels.

The rules are those of github.com/drewlinsley/pathfinder as of the commit ab9c130, with the Long Range Arena's
settings: strokes of 2 pixels half a pixel wide, a margin of 1, and no single strokes to distract. Its accidents are
kept, for they decide what the pictures look like; the modules name them.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial

import numpy as np

from ..chunks import Progress, check, in_order, settings_hash, stream
from ..documents import Cases, SequenceSet, content_hash, side_by_side
from .drawing import drawn
from .growth import SIDE
from .layout import Scenes, grown

__all__ = ["LEVELS", "Scenes", "drawn", "generate", "scenes"]

VERSION = 1
"""Of the generator: another one where a seed gives other pictures."""
LEVELS = {"hard": 14, "intermediate": 9, "easy": 6}
"""Strokes of a long snake. Short ones have a third of them, and there are as many as 20 strokes make."""
CHUNK = 500


def generate(
    seed: int = 0,
    *,
    level: str = "hard",
    images: int = 200_000,
    processes: int | None = None,
    progress: Progress | None = None,
) -> SequenceSet:
    """Pictures, row by row, and whether their markers are connected: the same for a seed, on any number of processes.

    Fewer images are the first of more. They are shuffled by the seed and cut into parts: a tenth of them for
    validation, as many for the test, the others for training.

    Args:
        seed: 0 or larger.
        level: "hard", "intermediate" or "easy".
        images: 10 or more.
        processes: all cores' worth unless given; see `in_order`.
        progress: called with the images that are done, and how many there will be.
    """
    check(seed, processes)
    _check_level(level)
    if images < 10:
        raise ValueError(f"images is {images}: take 10 or more, of which two tenths are for validation and test")
    tokens, labels = np.empty((images, SIDE * SIDE), dtype=np.uint8), np.empty(images, dtype=np.int64)
    with closing(in_order(partial(_chunk, seed, level), range(-(-images // CHUNK)), processes)) as chunks:
        for start, (pictures, truths) in zip(range(0, images, CHUNK), chunks, strict=True):
            end = min(start + CHUNK, images)
            tokens[start:end] = pictures[: end - start].reshape(-1, SIDE * SIDE)
            labels[start:end] = truths[: end - start]
            if progress:
                progress(end, images)
    documents = side_by_side(tokens.reshape(-1), np.full(images, SIDE * SIDE), shift=0)
    tenth = images // 10
    cuts = np.split(stream(seed, LEVELS[level]).permutation(images), [images - 2 * tenth, images - tenth])
    parts = {part: Cases(cut, labels[cut]) for part, cut in zip(("train", "validation", "test"), cuts, strict=True)}
    return SequenceSet(
        name="lra-pathfinder" if level == "hard" else f"lra-pathfinder-{level}",
        title="Pathfinder" if level == "hard" else f"Pathfinder ({level})",
        documents=documents,
        parts=parts,
        classes=("not connected", "connected"),
        length=SIDE * SIDE,
        vocabulary=256,
        notes=(f"contours of {LEVELS[level]} strokes",),
        origin=f"generated with seed {seed}",
        hash=content_hash(documents, parts),
        source_hash=settings_hash("pathfinder", VERSION, seed=seed, level=level, images=images),
    )


def scenes(seed: int = 0, *, level: str = "hard", chunk: int = 0) -> Scenes:
    """What is in the images `CHUNK * chunk` and following of a seed, stroke by stroke; `drawn` makes the pictures."""
    _check_level(level)
    length = LEVELS[level]
    strokes = length // 3
    return grown(stream(seed, length, chunk), CHUNK, length, (20 // strokes, strokes))


def _chunk(seed: int, level: str, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    here = scenes(seed, level=level, chunk=chunk)
    return drawn(here), here.labels


def _check_level(level: str) -> None:
    if level not in LEVELS:
        raise ValueError(f"there is no level {level!r}: take one of {', '.join(LEVELS)}")
