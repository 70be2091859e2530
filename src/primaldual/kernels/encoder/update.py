"""A step of the optimiser for all members."""

from __future__ import annotations

from torch import Tensor

from ..launching import launch_kernel

BLOCK = 1024
"""Weights of a program."""


def clipped_update(
    matrix: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, reduced: Tensor, norms: Tensor, clip: float,
    alive: Tensor, table: Tensor, done: Tensor, square_share: float, decayed: Tensor | None = None,
) -> None:  # fmt: skip
    """A step of RAdam, Adam or AdamW in place, by a gradient whose rows are cut to a norm.

    Args:
        matrix, gradient, mean, square: weights [members, count], and what the optimiser knows of each.
        reduced: a copy of the last columns in another dtype, to be kept up to date; may be empty.
        norms: of the gradient's rows.
        clip: the largest norm.
        alive: [members]; the gradient of others is 0.
        table: coefficients of every step: those of `done` are taken, or the last ones.
        done: how many steps came before.
        square_share: of the gradient's square in `square`.
        decayed: [count], boolean: the weights that shrink; None for all of them.
    """
    from .update_kernel import update

    members, count = matrix.shape
    launch_kernel(
        update, (-(-count // BLOCK), members, 1),
        (matrix, gradient, mean, square, reduced, norms, alive, table, done, alive if decayed is None else decayed),
        (
            count, count - reduced.shape[1], len(table), clip, square_share, BLOCK, reduced.shape[1] > 0,
            decayed is not None,
        ),
    )  # fmt: skip
