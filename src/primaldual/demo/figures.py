"""The demo's figures, drawn from its results."""

from __future__ import annotations

from typing import NamedTuple

from ..report import maps, plots
from .recipe import PAPER
from .results import MEGA, Results


class Figures(NamedTuple):
    """SVG, but for `picture`, which is the PNG of the README."""

    accuracy: bytes
    curves: bytes
    cost: bytes
    heads: bytes
    sweep: bytes | None
    picture: bytes


def draw(results: Results) -> Figures:
    """All of them; the sweep only where it was run."""
    runs = {name: results.of(name) for name in results.expansions}
    before, after = ({name: results.flops(name, rewritten) / MEGA for name in runs} for rewritten in (False, True))
    # the last layer of seed 0
    heads = {name: first.maps[-1].numpy() for name, (first, *_) in runs.items()}
    scales = {
        name: expansion.primal.training_set.head_scales(results.recipe.heads)
        for name, expansion in results.expansions.items()
    }
    by_beta = {beta: [run.accuracy for run in found] for beta, found in results.by_beta().items()}
    accuracy = {name: results.accuracy(name).text(1) for name in runs}
    return Figures(
        accuracy=plots.accuracy_points({name: [run.accuracy for run in found] for name, found in runs.items()}, PAPER),
        curves=plots.training_curves(
            {name: [run.losses for run in found] for name, found in runs.items()},
            {name: [run.accuracies for run in found] for name, found in runs.items()},
        ),
        cost=plots.cost_bars(before, after, "attention MFLOPs per series, forward"),
        heads=maps.head_maps(heads, scales),
        sweep=plots.sweep(by_beta) if by_beta else None,
        picture=maps.heads_picture(
            {name: heads[name] for name in ("softmax", "bn+sh")}, scales, accuracy, before, after
        ),
    )
