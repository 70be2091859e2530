"""Series that could as well have been measured: noise, sizes, speeds, lost channels, mixtures."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..primal import Spec
from ..primal._spec import is_number


@dataclass(frozen=True)
class Augmentation(Spec):
    """How far a training series is changed each time that it is seen; 0 leaves a part out.

    Args:
        jitter: deviation of the noise on every value.
        scaling: deviation of the factor on every channel.
        warp: the largest change of speed, as a share; half of it is the largest shift, a sixth a slow swing of time.
        drop: the chance of a channel to be 0, where there are more than two.
        cut: the largest share of the steps that is set to 0, in one window.
        mix: the largest share of another series of the batch that is mixed in, with its target.
    """

    jitter: float = 0.1
    scaling: float = 0.2
    warp: float = 0.2
    drop: float = 0.1
    cut: float = 0.0
    mix: float = 0.3

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"Augmentation: {field.name} must be in [0, 1), got {value!r}")

    def __call__(
        self, series: Tensor, padding: Tensor | None, targets: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Other series of the same shape, their padding and targets, without waiting for the device.

        Args:
            series: [batch, length, channels], 0 at padded steps.
            padding: [batch, length], True after the end of a series.
            targets: [batch, outputs], floating.
            generator: of the device; None for torch's own.
        """
        x, (batch, length, channels) = series, series.shape
        draw = _Drawn(x, generator)
        if self.warp:
            x = self._warped(x, padding, draw)
        if self.scaling:
            x = x * (1 + self.scaling * draw.normal(batch, 1, channels))
        if self.jitter:
            x = x + self.jitter * draw.normal(batch, length, channels)
        if self.drop and channels > 2:
            x = x * (draw.uniform(batch, 1, channels) >= self.drop)
        if self.cut:
            place = torch.linspace(0, 1, length, device=x.device, dtype=x.dtype)[None, :, None]
            x = x * ((place - draw.uniform(batch, 1, 1)).abs() > self.cut / 2 * draw.uniform(batch, 1, 1))
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        if not self.mix or batch < 2:
            return x, padding, targets
        share = self.mix * draw.uniform(batch, 1, 1)
        other = x.roll(1, 0)  # the order of a batch is random
        targets = targets + share[:, 0] * (targets.roll(1, 0) - targets)
        return x + share * (other - x), None if padding is None else padding & padding.roll(1, 0), targets

    def _warped(self, x: Tensor, padding: Tensor | None, draw: _Drawn) -> Tensor:
        """Each series at other times of its own, linear between steps, its ends repeated."""
        batch, length, channels = x.shape
        steps = torch.arange(length, device=x.device, dtype=x.dtype).expand(batch, -1)
        last = steps[:, -1:] if padding is None else ((~padding).sum(1, keepdim=True) - 1).clamp(min=1).to(x)
        place = steps / max(1, length - 1) if padding is None else (steps / last).clamp(max=1)
        speed, shift, swing, phase = (draw.uniform(4, batch, 1) * 2 - 1).unbind(0)
        place = (place - 0.5) * (1 + self.warp * speed) + 0.5 + self.warp / 2 * shift
        place = place + self.warp / 6 * swing * torch.sin(2 * torch.pi * place + torch.pi * phase)
        at = place.clamp(0, 1) * last
        before = at.floor().clamp(max=length - 1).long().unsqueeze(-1).expand(-1, -1, channels)
        wide = pad(x, (0, 0, 0, 1))
        after = torch.minimum(before + 1, last.long().unsqueeze(-1))
        first, second = wide.gather(1, before), wide.gather(1, after)
        return first + (second - first) * (at - at.floor()).unsqueeze(-1)


class _Drawn:
    """Random tensors of the dtype and on the device of another."""

    def __init__(self, like: Tensor, generator: torch.Generator | None) -> None:
        self.options: Any = {"dtype": like.dtype, "device": like.device, "generator": generator}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.options)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, **self.options)
