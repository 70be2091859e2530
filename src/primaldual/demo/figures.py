"""The demo's figures, drawn from its results."""

from __future__ import annotations

from typing import NamedTuple

from ..report import maps, plots
from .results import MEGA, Results
from .settings import PAPER


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
    trained = {name: results.of(name) for name in results.expansions}
    before, after = ({name: results.flops(name, rewritten) / MEGA for name in trained} for rewritten in (False, True))
    # the last layer of seed 0
    heads = {name: first.maps[-1].numpy() for name, (first, *_) in trained.items()}
    scales = {
        name: expansion.primal.training_set.head_scales(results.config.heads)
        for name, expansion in results.expansions.items()
    }
    by_beta = {beta: [member.accuracy for member in found] for beta, found in results.by_beta().items()}
    accuracy = {name: results.accuracy(name).text(1) for name in trained}
    return Figures(
        accuracy=plots.accuracy_points(
            {name: [member.accuracy for member in found] for name, found in trained.items()}, PAPER
        ),
        curves=plots.training_curves(
            {name: [member.losses for member in found] for name, found in trained.items()},
            {name: [member.accuracies for member in found] for name, found in trained.items()},
        ),
        cost=plots.cost_bars(before, after, "attention MFLOPs per series, forward"),
        heads=maps.head_maps(heads, scales),
        sweep=plots.sweep(by_beta) if by_beta else None,
        picture=maps.heads_picture(
            {name: heads[name] for name in ("softmax", "bn+sh")}, scales, accuracy, before, after
        ),
    )
