"""Series that could as well have been measured: noise, sizes, speeds, lost channels, mixtures."""

from __future__ import annotations

from dataclasses import dataclass, fields

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

    def __call__(self, series: Tensor, padding: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Other series of the same shape, their padding and targets.

        Drawn by torch's generator of the device, without waiting for it.

        Args:
            series: [batch, length, channels], 0 at padded steps.
            padding: [batch, length], True after the end of a series.
            targets: [batch, outputs], floating.
        """
        x, (batch, length, channels) = series, series.shape
        one = x.new_ones(batch, 1, 1)
        if self.warp:
            x = self._warped(x, padding)
        if self.scaling:
            x = x * (1 + self.scaling * torch.randn_like(x[:, :1]))
        if self.jitter:
            x = x + self.jitter * torch.randn_like(x)
        if self.drop and channels > 2:
            x = x * (torch.rand_like(x[:, :1]) >= self.drop)
        if self.cut:
            place = torch.linspace(0, 1, length, device=x.device, dtype=x.dtype)[None, :, None]
            x = x * ((place - torch.rand_like(one)).abs() > self.cut / 2 * torch.rand_like(one))
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        if not self.mix or batch < 2:
            return x, padding, targets
        share = self.mix * torch.rand_like(one)
        other = x.roll(1, 0)  # the order of a batch is random
        targets = targets + share[:, 0] * (targets.roll(1, 0) - targets)
        return x + share * (other - x), None if padding is None else padding & padding.roll(1, 0), targets

    def _warped(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Each series at other times of its own, linear between steps, its ends repeated."""
        batch, length, channels = x.shape
        steps = torch.arange(length, device=x.device, dtype=x.dtype).expand(batch, -1)
        last = steps[:, -1:] if padding is None else ((~padding).sum(1, keepdim=True) - 1).clamp(min=1).to(x)
        place = steps / max(1, length - 1) if padding is None else (steps / last).clamp(max=1)
        speed, shift, swing, phase = (torch.rand(4, batch, 1, device=x.device, dtype=x.dtype) * 2 - 1).unbind(0)
        place = (place - 0.5) * (1 + self.warp * speed) + 0.5 + self.warp / 2 * shift
        place = place + self.warp / 6 * swing * torch.sin(2 * torch.pi * place + torch.pi * phase)
        at = place.clamp(0, 1) * last
        before = at.floor().clamp(max=length - 1).long().unsqueeze(-1).expand(-1, -1, channels)
        wide = pad(x, (0, 0, 0, 1))
        after = torch.minimum(before + 1, last.long().unsqueeze(-1))
        first, second = wide.gather(1, before), wide.gather(1, after)
        return first + (second - first) * (at - at.floor()).unsqueeze(-1)
