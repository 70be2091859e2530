"""A small text for the training tests: the licence of this repository."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from primaldual.data.text import TextSet, load
from primaldual.training import Recipe, text_recipe

LICENSE = Path(__file__).parents[2] / "LICENSE"


@cache
def licence() -> TextSet:
    """Its bytes: nine tenths for training, a twentieth each for validation and test."""
    with TemporaryDirectory() as folder:  # what is mapped stays
        return load(LICENSE, cache_dir=folder)


def tiny(**changes) -> Recipe:
    """Of a model of 11,000 parameters, for a few steps."""
    settings = {"d_model": 16, "heads": 2, "layers": 2, "feedforward": 32, "context": 48, "dtype": "float64"}
    return text_recipe(**{"steps": 6, "batch_size": 4, "evaluate_every": 2, **settings, **changes})
