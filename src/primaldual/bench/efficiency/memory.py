"""The peak memory of a step, in closed form: the largest of its moments.

At every moment there are the weights, the tokens, what was kept so far (`tensors`), gradients of the weights that the
backward pass has been through, and what is being worked on. The moments that can be the largest are those of attention
and feed-forward; each is named, and the peak says which it is. What one operator holds beside its inputs and outputs,
such as the workspace of a matrix product or of a fused attention, is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .setting import CLASSES, Setting
from .tensors import Group, Tensors

TOKEN = 8
"""Bytes of a token's id."""


class Peak(NamedTuple):
    """The most bytes there are at once, and when."""

    bytes: int
    at: str


class Weights(NamedTuple):
    """How many weights there are, by part; biases included."""

    embeddings: int
    projections: int  # of each layer: queries, keys and values
    output: int  # of each layer
    norms: int  # of each layer
    feed_forward: tuple[int, int]  # of each layer
    end: int  # the last norm, and the head

    @classmethod
    def of(cls, setting: Setting) -> Weights:
        """Of the model."""
        d, f, sizes = setting.dimension, setting.sizes.feedforward, setting.sizes
        head = 4 * d * f + f + f * CLASSES + CLASSES
        return cls(
            (sizes.vocabulary + setting.length) * d, 3 * (d * d + d), d * d + d, 4 * d, (d * f + f, f * d + d),
            2 * d + head,
        )  # fmt: skip

    @property
    def layer(self) -> int:
        """Of a layer."""
        return self.projections + self.output + self.norms + sum(self.feed_forward)

    def total(self, layers: int) -> int:
        """Of the model."""
        return self.embeddings + layers * self.layer + self.end


def peak(name: str, setting: Setting) -> Peak:
    """Of a step of the model with this mechanism.

    >>> training, softmax = (peak(name, Setting(64, 4096)) for name in ("bn+sh", "softmax"))
    >>> round(training.bytes / softmax.bytes, 3)
    0.678
    """
    tensors = Tensors(name, setting)
    largest = max((training if setting.trains else inference)(tensors), key=lambda moment: moment.bytes)
    return Peak(largest.bytes + held(setting), largest.at)


def held(setting: Setting) -> int:
    """What is there before the step and after it: weights and tokens, and what the optimiser keeps if that is asked."""
    weights = Weights.of(setting).total(setting.sizes.layers) * setting.dtype.itemsize
    copies = 1 + ((2 if setting.trains else 3) if setting.optimizer else 0)
    return copies * weights + 2 * setting.pairs * setting.length * TOKEN


def training(t: Tensors) -> Iterator[Peak]:
    """The moments of a training step, beyond what is held."""
    setting, weights = t.setting, Weights.of(t.setting)
    layers, all_weights = setting.sizes.layers, weights.total(setting.sizes.layers)
    for earlier in range(setting.passes):  # documents that went through the encoder before this one, and are kept
        last = earlier == setting.passes - 1  # the way back begins with it
        begun = t.compared + earlier * t.encoder + t.mask(t.stream, setting.dropped)
        for lower in range(layers):
            kept = begun + lower * t.layer
            above = weights.end + (layers - 1 - lower) * weights.layer
            for moment in _forward(t):
                yield moment._replace(bytes=kept + moment.bytes)
            for moment, passed in _backward(t, weights):
                gradients = t.number * (above + passed if last else all_weights)
                yield moment._replace(bytes=kept + gradients + moment.bytes)
        yield Peak(begun + 2 * t.stream + t.number * all_weights, "backward, embeddings")


def _forward(t: Tensors) -> Iterator[Peak]:
    """Forward through a layer's attention: scores are there until its group is done."""
    if t.setting.fused:
        yield Peak(t.before + t.projected + t.stream, "forward, attention")
        return
    beside = t.stream if t.pools_inputs else 3 * t.stream if t.copied(t.groups[0]) else 0  # what copies were made of
    before = t.before + t.projected + beside
    for group in t.groups:
        emptied = t.scores(group) if t.sparse and t.setting.weights_dropped else 0
        before += t.weights(group)
        yield Peak(before + t.scores(group) + emptied, f"forward, weights of scale {group.scale}")


def _backward(t: Tensors, weights: Weights) -> Iterator[tuple[Peak, int]]:
    """Backward through a layer, and how many of its weights have their gradients by then."""
    gradient = t.stream  # the residual's; through dropout there is another one, and the mask is not needed any more
    if t.setting.dropped:
        gradient += t.stream - t.mask(t.stream, t.setting.dropped)
    yield Peak(t.layer + gradient + t.hidden, "backward, feed-forward"), weights.feed_forward[1]
    passed = sum(weights.feed_forward) + weights.norms + weights.output
    before = t.before + t.projected + 2 * t.stream  # gradients of the residual and of the heads' output
    if t.setting.fused:
        own = sum(t.weights(group) for group in t.groups) + t.stream  # the output is kept, too
        yield Peak(before + own + t.projected, "backward, attention"), passed
        return
    for group in t.groups:  # on the way back the last is the first
        yield Peak(before + _working(t, group), f"backward, weights of scale {group.scale}"), passed
        before += t.weights(group)


def _working(t: Tensors, group: Group) -> int:
    """What is there of a group's scores on the way back, when most is.

    The gradient of the weights beside all that was kept; through dropout two gradients beside the softmax's result and
    the mask; through the softmax its result, two gradients and, on a GPU, the product of result and gradient.
    """
    scores, mask = t.scores(group), t.mask(t.scores(group), t.setting.weights_dropped)
    through_softmax = (4 if t.setting.device == "cuda" else 3) * scores
    return max(t.weights(group) + scores, 3 * scores + mask, through_softmax + t.pattern(group))


def inference(t: Tensors) -> Iterator[Peak]:
    """The moments of inference in a layer, beyond what is held: nothing is kept."""
    yield Peak(3 * t.stream + 2 * t.hidden, "feed-forward")  # before and after attention, the norm's, GELU's two
    if t.setting.fused:
        yield Peak(3 * t.stream + t.projected, "attention")
        return
    before = 2 * t.stream + (t.stream if t.pools_inputs else 3 * t.stream)
    for group in t.groups:
        queries, keys, scores = t.queries(group), t.keys(group), t.scores(group)
        own = t.pooled_inputs(group) + 2 * keys if t.pools_inputs else 2 * keys if group.scale > 1 else 0
        own += queries + keys if t.recentred else 0
        if t.sparse and not t.remembered:
            yield Peak(before + own + t.building(group), f"pattern of scale {group.scale}")
            own += t.pattern(group)
        copies, at = (1 if t.copied(group) else 0), f"weights of scale {group.scale}"
        yield Peak(before + own + queries + copies * (queries + keys) + scores, at)
        yield Peak(before + own + (3 if t.sparse else 2) * scores, at)  # before the softmax, masked, and after it
        yield Peak(before + own + 2 * scores + queries + copies * keys, at)  # and the sum of values
        before += queries  # the output stays
