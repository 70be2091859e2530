"""What one prediction rests on: where heads look, and what is lost when a window of a channel is hidden."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Split
from ..regression.calls import AttentionCall, attention_calls
from ..regression.maps import head_maps, refusal
from ..training.predictor import Predictor
from ..training.series import series_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN, MOST, LEAST = 256, 24, 4
"""About so many windows of all channels are hidden in turn; of one channel no more and no fewer than these."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a prediction rests on.

    Args:
        predicted: the class, or the number.
        classes, probabilities: of a classifier, in one order; None for a number.
        series: [channels, steps], with what was missing filled in.
        contribution: [channels, steps]: how much less probable the predicted class is, or how much smaller the number,
            when the window of the channel that the step lies in is hidden behind the channel's mean in training.
        channels: [channels]: the same when the whole channel is hidden.
        attention: of every member that has attention, [layers, heads, steps]: the weight that the steps of the series
            get, the mean over queries, which sums to 1. Steps that are pooled into a token share its weight.
    """

    predicted: Any
    classes: np.ndarray | None
    probabilities: np.ndarray | None
    series: np.ndarray
    contribution: np.ndarray
    channels: np.ndarray
    attention: tuple[np.ndarray, ...]

    def plot(self, path: str | Path | None = None) -> Figure:
        """The series, what contributes, and where heads look, one below the other; as a PNG file, too, at a path."""
        from .explanation_plot import draw

        return draw(self, path)


def explain(
    predictor: Predictor, series: np.ndarray, device: torch.device, windows: int | None = None, jobs: int = 1
) -> Explanation:
    """Of the prediction for a series [steps, channels], which may have gaps."""
    split = predictor.prepared([series])
    found = predictor.together(predictor.outputs_of(split, device)).numpy()[0]
    if predictor.classes is None:
        chosen, predicted, probabilities = None, float(found), None
    else:
        chosen = int(found.argmax())
        predicted, probabilities = predictor.classes[chosen], found
    steps = int(split.lengths[0])
    contribution, channels = _contribution(predictor, split, steps, chosen, device, windows, jobs)
    mean, std = predictor.preparation.mean, predictor.preparation.std
    shown = (split.x[0, :steps].double().numpy() * std + mean).T
    each = [_attention(predictor.model(i), split) for i in range(len(predictor.configs))]
    attention = tuple(x for x in each if x is not None)
    return Explanation(predicted, predictor.classes, probabilities, shown, contribution, channels, attention)


def _contribution(
    predictor: Predictor, split: Split, steps: int, chosen: int | None, device: torch.device, windows: int | None,
    jobs: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """[channels, steps] and [channels], by hiding every window of every channel in turn, and every channel."""
    channels = split.x.shape[2]
    if windows is None:
        windows = min(MOST, max(LEAST, HIDDEN // channels))
    if isinstance(windows, bool) or not isinstance(windows, int) or windows < 1:
        raise ValueError(f"windows must be an integer of at least 1, got {windows!r}")
    ends = np.linspace(0, steps, min(windows, steps) + 1).round().astype(int)
    places = [(c, a, b) for c in range(channels) for a, b in pairwise(ends)]
    places += [(c, 0, steps) for c in range(channels)]
    x = split.x.repeat(len(places) + 1, 1, 1)
    for row, (channel, start, end) in zip(x, places, strict=False):  # the last one stays whole
        row[start:end, channel] = 0.0
    many = Split(x, split.lengths.repeat(len(x)), torch.zeros(len(x)))
    found = predictor.together(predictor.outputs_of(many, device, jobs)).numpy()
    values = found if chosen is None else found[:, chosen]
    lost = values[-1] - values[:-1]
    contribution = np.zeros((channels, steps))
    for value, (channel, start, end) in zip(lost[:-channels], places, strict=False):
        contribution[channel, start:end] = value
    return contribution, lost[-channels:]


def _attention(model: nn.Module, split: Split) -> np.ndarray | None:
    """[layers, heads, steps]; None for a model without attention layers."""
    config: Any = model.config
    if not getattr(config, "layers", 0):
        return None
    x, padding, _ = series_tensors(split, next(model.parameters()).dtype, torch.device("cpu"))
    return np.stack([_received(call, split, config) for call in attention_calls(model, (x, padding))])


def _received(call: AttentionCall, split: Split, config: Any) -> np.ndarray:
    """[heads, steps]: the weight that steps get of all queries."""
    maps = head_maps(call, 0, "repeated" if refusal(call) else "shared")[..., : call.tokens]
    steps, stride = int(split.lengths[0]), getattr(config, "stride", 1)
    tokens = -(-steps // stride)
    weights: Tensor = maps[:, :tokens, :tokens].double().mean(1)
    counts = torch.full((tokens,), stride)
    counts[-1] = steps - stride * (tokens - 1)
    spread = (weights / counts).repeat_interleave(counts, 1)
    return (spread / spread.sum(1, keepdim=True).clamp(min=1e-12)).numpy()
