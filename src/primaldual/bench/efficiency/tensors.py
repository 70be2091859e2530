"""Bytes of the tensors of one encoder layer in one pass, and which of them training keeps for the backward pass.

A *stream* is a tensor [sequences, N, d], a number for every channel of every token. Of a layer the backward pass needs

    before         what comes in, for the first norm; what that gives, for the projections; the norm's statistics
    projected      queries, keys and values
    weights        of each group of heads of one scale, scores and what is made of them:
                     materialised: the softmax's result; with dropout its mask and what it leaves, for the values' sum
                     fused: the logarithm of each row's sum
    after          the heads' output, for the output projection; the sum with the residual, for the second norm; what
                   that gives; hidden numbers before GELU, and after it and dropout; the masks of all dropout

A sparse pattern in a matrix of scores also keeps the pairs that it hides, once for all sequences, and one more matrix:
rows without a key are emptied after the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...dual import GroupHeadsByScale
from ...ops.pooling import REMEMBERED
from ...primal import Sparse, mechanism
from ...primal.sparse import PAIRS_AT_ONCE
from .setting import Setting

STATISTIC = 4
"""Bytes of a norm's mean, of its deviation, and of the logarithm of a row's sum."""


class Group(NamedTuple):
    """Heads of one scale: how many, and the points that each of them is fitted to."""

    scale: int
    heads: int
    points: int


@dataclass(frozen=True)
class Tensors:
    """Of a layer with this mechanism, in bytes."""

    name: str
    setting: Setting

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """In the order in which they run."""
        training_set = mechanism(self.name).training_set
        scales = training_set.head_scales(self.setting.sizes.heads)
        return tuple(
            Group(scale, len(heads), training_set.points(scale, self.setting.length))
            for scale, heads in GroupHeadsByScale.groups(scales)
        )

    @property
    def sparse(self) -> bool:
        """Whether a pattern hides pairs."""
        return isinstance(mechanism(self.name).training_set, Sparse)

    @property
    def pools_inputs(self) -> bool:
        """Whether inputs are pooled before they are projected."""
        return len(self.groups) > 1 and not self.sparse

    @property
    def recentred(self) -> bool:
        """Whether queries, and in 32 bits keys, are written once more with a mean taken off."""
        return bool(mechanism(self.name).point_maps)

    @property
    def number(self) -> int:
        """Bytes of a number."""
        return self.setting.dtype.itemsize

    # sizes

    @property
    def stream(self) -> int:
        """[sequences, N, d]"""
        return self.setting.sequences * self.setting.length * self.setting.dimension * self.number

    @property
    def hidden(self) -> int:
        """[sequences, N, f]"""
        return self.stream * self.setting.sizes.feedforward // self.setting.dimension

    @property
    def statistics(self) -> int:
        """Of a norm: [2, sequences, N]"""
        return 2 * STATISTIC * self.setting.sequences * self.setting.length

    def queries(self, group: Group) -> int:
        """[sequences, heads, N, D]"""
        return self.stream * group.heads // self.setting.sizes.heads

    def keys(self, group: Group) -> int:
        """[sequences, heads, points, D]"""
        return self.queries(group) * group.points // self.setting.length

    def pooled_inputs(self, group: Group) -> int:
        """[sequences, points, d]; nothing where every token is a point."""
        return 0 if group.scale == 1 else self.stream * group.points // self.setting.length

    def scores(self, group: Group) -> int:
        """[sequences, heads, N, points]"""
        return self.setting.sequences * group.heads * self.setting.length * group.points * self.number

    def pattern(self, group: Group) -> int:
        """[N, points] of booleans; nothing where there is no pattern."""
        return self.setting.length * group.points if self.sparse else 0

    @property
    def remembered(self) -> bool:
        """Whether patterns are made once, and not in a step."""
        return self.setting.device == "cuda" and self.setting.length**2 <= REMEMBERED

    def building(self, group: Group) -> int:
        """What asking the rule of a pattern takes beside its answer: two 64-bit integers for the pairs of some rows."""
        return 16 * min(self.pattern(group), PAIRS_AT_ONCE)

    def mask(self, size: int, p: float) -> int:
        """What dropout keeps of numbers of this size: a byte for each on a GPU, a number on a CPU."""
        return 0 if p == 0 else size if self.setting.device == "cpu" else size // self.number

    def copied(self, group: Group) -> bool:
        """Whether a matrix product takes copies of what was projected: several heads of several sequences."""
        return group.heads > 1 and self.setting.sequences > 1

    # kept

    @property
    def before(self) -> int:
        """Kept before the projections."""
        return 2 * self.stream + self.statistics

    @property
    def projected(self) -> int:
        """Kept of queries, keys and values."""
        if self.setting.fused:
            return self._fused_projected
        if self.pools_inputs:
            points = sum(2 * self.keys(group) + self.pooled_inputs(group) for group in self.groups)
            return self.stream + points  # queries divided by √D, not those before
        first = self.groups[0]
        if len(self.groups) == 1:  # copies; or the product that all three came of, and queries divided by √D
            return (3 if self.copied(first) else 4) * self.stream
        shifted = self.keys(first) if self.recentred else 0
        return 4 * self.stream + shifted + sum(2 * self.keys(group) for group in self.groups[1:])

    @property
    def _fused_projected(self) -> int:
        """What a fused attention is called with: inputs are pooled once more on the way back, and not kept."""
        if self.pools_inputs:
            return self.stream + sum(2 * self.keys(group) for group in self.groups)
        return 3 * self.stream + sum(2 * self.keys(group) for group in self.groups[1:])

    def weights(self, group: Group) -> int:
        """Kept of the weights of a group."""
        setting, scores = self.setting, self.scores(group)
        if setting.fused:
            return STATISTIC * setting.sequences * group.heads * setting.length
        kept = scores + self.mask(scores, setting.weights_dropped)
        kept += scores if setting.weights_dropped or self.sparse else 0  # what the values are summed with
        return kept + (self.pattern(group) + setting.length if self.sparse else 0)

    @property
    def after(self) -> int:
        """Kept after the heads."""
        masks = self.mask(2 * self.stream + self.hidden, self.setting.dropped)
        return 3 * self.stream + self.statistics + 2 * self.hidden + masks

    @property
    def layer(self) -> int:
        """All that a layer keeps."""
        return self.before + self.projected + sum(map(self.weights, self.groups)) + self.after

    @property
    def encoder(self) -> int:
        """What a pass keeps: of the dropout of embeddings, of all layers, and the last norm's input."""
        ends = self.mask(self.stream, self.setting.dropped) + self.stream + self.statistics
        return self.setting.sizes.layers * self.layer + ends

    @property
    def compared(self) -> int:
        """Kept of the comparison of two documents: their means, the four parts side by side, hidden numbers."""
        numbers = self.setting.pairs * (6 * self.setting.dimension + self.setting.sizes.feedforward)
        return numbers * self.number

    @property
    def kept(self) -> int:
        """All that a training step keeps when it turns back."""
        return self.setting.passes * self.encoder + self.compared
