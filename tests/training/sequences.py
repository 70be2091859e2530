"""Small sets of sequences for the training tests."""

import numpy as np

from primaldual.data.sequences import Cases, Documents, SequenceSet
from primaldual.models import SequenceSizes
from primaldual.training import Recipe

SIZES = SequenceSizes(d_model=8, heads=2, layers=1, feedforward=8, vocabulary=17, dropout=0.0)


def sequences(*, pairs: bool = False, bits: int = 4, shift: int = 1, length: int = 160, full: bool = False):
    """Documents of random tokens of unequal lengths; the label is whether token 1 is frequent."""
    draw = np.random.default_rng(0)
    lengths = np.full(40, length) if full else draw.integers(1, length + 1, 40)
    tokens = [draw.integers(0, 16, many) for many in lengths]
    for one in tokens[::2]:
        one[draw.random(len(one)) < 0.5] = 1
    flat = np.concatenate(tokens).astype(np.uint8)
    if bits == 4:
        flat = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
        flat = flat[::2] | (flat[1::2] << 4)
    documents = Documents(flat, np.concatenate([[0], np.cumsum(lengths)]), shift, bits)
    parts = {}
    for part, (first, last) in {"train": (0, 24), "validation": (24, 32), "test": (32, 40)}.items():
        chosen = np.arange(first, last)
        labels = (chosen % 2).astype(np.int64)
        parts[part] = Cases(np.stack([chosen, chosen[::-1]], 1) if pairs else chosen, labels)
    return SequenceSet("toy", "Toy", documents, parts, ("many", "few"), length, 16 + shift, hash="0")


def short(**changes) -> Recipe:
    """A recipe of milliseconds: exact."""
    recipe = Recipe(SIZES, steps=6, batch_size=8, optimizer="adamw", evaluate_every=2, clip=None)
    return recipe.having(**{"dtype": "float64"} | changes)
