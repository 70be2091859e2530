"""ListOps: the value of a long expression of nested operators on digits, such as [MAX 2 9 [MIN 4 7 ] 0 ]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from hashlib import blake2b
from itertools import count

import numpy as np

from .chunks import Progress, check, in_order, settings_hash, stream
from .documents import Cases, SequenceSet, content_hash, side_by_side
from .expressions import CLOSE, MIN, NAMES, Expressions, grow

VERSION = 1
"""Of the generator: another one where a seed gives other expressions."""
SIZES = (96_000, 2_000, 2_000)
PARTS = ("train", "validation", "test")
_TRIES = 8192  # a chunk: some 670 are kept


def generate(
    seed: int = 0,
    *,
    brackets: bool = False,
    sizes: tuple[int, int, int] = SIZES,
    processes: int | None = None,
    progress: Progress | None = None,
) -> SequenceSet:
    """Expressions, each of them once, and their values: the same for a seed, on any number of processes.

    Without brackets a document is the digits and operators alone. That is what published numbers were measured on; the
    nesting is lost, so that no model can do much better than guess. With them every operator opens a bracket, and a
    token of its own closes it; the expressions of a seed are the same either way.

    Args:
        seed: 0 or larger.
        brackets: whether tokens say where an operator's arguments end.
        sizes: of the training, validation and test parts, cut in this order from what is grown.
        processes: all cores' worth unless given; see `in_order`.
        progress: called with the expressions that are done, and how many there will be.
    """
    check(seed, processes)
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"sizes is {sizes}: take three, for {', '.join(PARTS)}, of 1 or more expressions")
    tokens, lengths, labels = _distinct(seed, sum(sizes), processes, progress)
    if not brackets:
        lengths -= np.add.reduceat(tokens == CLOSE, np.cumsum(lengths) - lengths, dtype=np.int64)
        tokens = tokens[tokens != CLOSE]
    documents = side_by_side(tokens, lengths, bits=4)
    cuts = np.split(np.arange(len(labels)), np.cumsum(sizes)[:-1])
    parts = {part: Cases(cut, labels[cut]) for part, cut in zip(PARTS, cuts, strict=True)}
    return SequenceSet(
        name="lra-listops-brackets" if brackets else "lra-listops",
        title="ListOps (with brackets)" if brackets else "ListOps",
        documents=documents,
        parts=parts,
        classes=NAMES[:10],
        length=2048,
        vocabulary=1 + (len(NAMES) if brackets else CLOSE),
        notes=() if brackets else ("without brackets, as in published numbers: the nesting is lost",),
        origin=f"generated with seed {seed}",
        hash=content_hash(documents, parts),
        source_hash=settings_hash("listops", VERSION, seed=seed, brackets=brackets, sizes=sizes),
    )


def _chunk(seed: int, chunk: int) -> Expressions:
    return grow(stream(seed, chunk), _TRIES)


def _distinct(seed: int, wanted: int, processes: int | None, progress: Progress | None) -> Expressions:
    """The first of all that are grown, without those that were there before."""
    seen: set[bytes] = set()
    tokens: list[np.ndarray] = []
    labels: list[int] = []
    with closing(in_order(partial(_chunk, seed), count(), processes)) as chunks:
        for chunk in chunks:
            expressions = np.split(chunk.tokens, np.cumsum(chunk.lengths)[:-1])
            for expression, label in zip(expressions, chunk.labels.tolist(), strict=True):
                digest = blake2b(expression.data, digest_size=16).digest()
                if digest not in seen and len(tokens) < wanted:
                    seen.add(digest)
                    tokens.append(expression)
                    labels.append(label)
            if progress:
                progress(len(tokens), wanted)
            if len(tokens) == wanted:
                break
    return Expressions(np.concatenate(tokens), np.array([len(one) for one in tokens]), np.array(labels))


def lines(data: SequenceSet, part: str) -> Iterator[str]:
    """A part as text: a line "Source<TAB>Target", then an expression and its value a line.

    An operator takes its arguments one by one, and each time what is there so far is put in parentheses.

    >>> data = generate(sizes=(1, 1, 1), brackets=True, processes=1)
    >>> [header, one] = lines(data, "test")
    >>> header, one.partition("\\t")[0][-4:]
    ('Source\\tTarget', ' ] )')
    """
    if data.name != "lra-listops-brackets":
        raise ValueError(f"{data.name} does not say how its expressions are nested: take generate(brackets=True)")
    yield "Source\tTarget"
    cases = data.parts[part]
    for document, label in zip(cases.documents.tolist(), cases.labels.tolist(), strict=True):
        yield f"{source(data.documents[document] - data.documents.shift)}\t{label}"


def source(tokens: np.ndarray) -> str:
    """An expression of tokens with brackets, in parentheses.

    >>> source(np.array([11, 2, 9, 14]))
    '( ( ( [MAX 2 ) 9 ) ] )'
    """
    words: list[str] = []
    starts: list[int] = []  # of the operators that are open
    for token in tokens.tolist():
        if MIN <= token < CLOSE:
            starts.append(len(words))
            words.append(f"[{NAMES[token]}")
            continue
        words.append(NAMES[token])
        at = len(words) - 1
        if token == CLOSE:
            if not starts:
                raise ValueError("a bracket closes that none has opened: this is no expression with brackets")
            at = starts.pop()
            words += ")"
            words[at] = f"( {words[at]}"
        if starts:
            words += ")"
            words[starts[-1]] = f"( {words[starts[-1]]}"
    if starts:
        raise ValueError(f"{len(starts)} brackets are not closed: this is no expression with brackets")
    return " ".join(words)
