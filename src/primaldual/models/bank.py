"""A layer of attention to prototypes whose values are left to a regression: nothing in it is trained by gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, softplus

from ..primal import Spec
from ..primal._spec import check_count, is_number
from .patterns import standardised

DRAWN = 64
"""Series that biases are read off."""
KEPT = 4096
"""Scores of a prototype among which its biases are quantiles."""
MOST_CHANNELS = 9
"""That a prototype sees."""


@dataclass(frozen=True)
class BankSizes(Spec):
    """How many prototypes there are, and what they look like.

    Args:
        prototypes: in all; every dilation has as many.
        widths: steps of a prototype, odd; a share of the prototypes each.
        biases: per prototype: quantiles of its scores on training series.
        scale: on the scores, in units of their deviation: the larger, the more of an attention weight is 0 or 1.
        level: deviation of what is added to a random prototype, whose own is 1; with 0 it sums to 0 in each channel and
            sees shapes alone, never the level of a series.
        windows: share of the prototypes that are windows of training series; the others are random.
        instance: whether each series is standardised by itself, on top of its channels.
        energy: whether the mean over windows of log h, the kernel sum of a head's two keys, is a feature, too: how like
            a prototype they are, not only which share of them.
    """

    prototypes: int = 4096
    widths: tuple[int, ...] = (9,)
    biases: int = 3
    scale: float = 10.0
    level: float = 0.0
    windows: float = 0.0
    instance: bool = False
    energy: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        for name in ("prototypes", "biases"):
            check_count("BankSizes", name, getattr(self, name))
        if not self.widths or any(not isinstance(w, int) or w < 3 or w % 2 == 0 for w in self.widths):
            raise ValueError(f"BankSizes: widths must be odd numbers of steps of at least 3, got {self.widths!r}")
        if not is_number(self.windows) or not 0 <= self.windows <= 1:
            raise ValueError(f"BankSizes: windows must be a share in [0, 1], got {self.windows!r}")
        if not is_number(self.level) or not 0 <= self.level < math.inf:
            raise ValueError(f"BankSizes: level must be a number of at least 0, got {self.level!r}")
        if not is_number(self.scale) or not 0 < self.scale < math.inf:
            raise ValueError(f"BankSizes: scale must be a positive number, got {self.scale!r}")

    @property
    def features(self) -> int:
        """Of each prototype."""
        return self.biases * (1 + self.energy)


class PrototypeBank(nn.Module):
    """Every window of a series attends to prototypes; the features are the mean attention weights.

    A window x_j is a query. Head (s, b) has two keys, the prototype p_s and the origin with the bias b on its score,
    and softmax attention between the two is

        κ(x_j, p_s) / (κ(x_j, p_s) + e^{scale·b} κ(x_j, 0)) = sigmoid(scale · (x_j·p_s − b)).

    The mean over j is a soft share of windows that are like p_s. Less what is the same for the origin alone, log h is
    softplus(scale · (x_j·p_s − b)): its mean, the energy, grows with how like p_s they are. A regression on these
    features gives each head its value v_s: the class scores are then attention to prototypes, Σ_s weight_s(x_j) v_s,
    averaged over the windows, and v_s is solved for, not trained. Windows are of several dilations; a prototype sees a
    few channels.

    Args:
        kernels: of every width and dilation, [prototypes, channels, width]; divided by the deviation of their scores.
        thresholds: of the same, [prototypes, biases].
        dilations: of the same.
        sizes: what they were drawn by.
    """

    def __init__(
        self, kernels: list[Tensor], thresholds: list[Tensor], dilations: tuple[int, ...], sizes: BankSizes
    ) -> None:
        super().__init__()
        self.sizes, self.dilations = sizes, dilations
        for i, (kernel, threshold) in enumerate(zip(kernels, thresholds, strict=True)):
            self.register_buffer(f"kernel_{i}", kernel)
            self.register_buffer(f"threshold_{i}", threshold)

    @staticmethod
    @torch.no_grad()
    def drawn(sizes: BankSizes, series: Tensor, padding: Tensor | None, seed: int) -> PrototypeBank:
        """Prototypes for training series [cases, length, channels], drawn on the CPU by a seed."""
        generator = torch.Generator().manual_seed(seed)
        few = torch.randperm(len(series), generator=generator)[:DRAWN]
        x = series.cpu()[few].float()
        hidden = None if padding is None else padding.cpu()[few]
        x = (standardised(x, hidden) if sizes.instance else x).transpose(1, 2)
        steps = mean_steps(series, padding)
        found = places(sizes, steps)
        each = -(-sizes.prototypes // len(found))
        kernels, thresholds = [], []
        for width, dilation in found:
            kernel = _random(each, x.shape[1], width, sizes.level, generator)
            if many := round(sizes.windows * each):
                kernel[:many] = _windows(kernel[:many], x, hidden, dilation, generator)
            scores = conv1d(x, kernel, padding=dilation * (width // 2), dilation=dilation).transpose(0, 1)
            own = scores.flatten(1) if hidden is None else scores[:, ~hidden]
            deviation = own.std(1).nan_to_num(nan=1.0).clamp(min=1e-6)
            if own.shape[1] > KEPT:
                own = own[:, torch.randint(own.shape[1], (KEPT,), generator=generator)]
            at = (0.05 + 0.9 * _uniform(generator, each, sizes.biases)) * (own.shape[1] - 1)
            kernels.append(kernel / deviation[:, None, None])
            thresholds.append(own.sort(1).values.gather(1, at.long()) / deviation[:, None])
        bank = PrototypeBank(kernels, thresholds, tuple(d for _, d in found), sizes)
        return bank.to(series.device)

    @torch.no_grad()
    def forward(self, series: Tensor, padding: Tensor | None = None) -> Tensor:
        """Features [batch, prototypes · biases], as often again with the energy.

        Args:
            series: [batch, length, channels], 0 at padded steps.
            padding: [batch, length], True after the end of a series.
        """
        x = (standardised(series, padding) if self.sizes.instance else series).transpose(1, 2)
        count = x.shape[2] if padding is None else (~padding).sum(1, keepdim=True)
        found = []
        for i, dilation in enumerate(self.dilations):
            kernel, thresholds = self.get_buffer(f"kernel_{i}"), self.get_buffer(f"threshold_{i}")
            scores = conv1d(x, self.sizes.scale * kernel, padding=dilation * (kernel.shape[-1] // 2), dilation=dilation)
            if padding is not None:
                scores.masked_fill_(padding.unsqueeze(1), -math.inf)  # of weight 0, and of no energy
            for threshold in self.sizes.scale * thresholds.T:
                above = scores - threshold[:, None]
                if self.sizes.energy:
                    found.append(softplus(above).sum(-1) / (count * self.sizes.scale))
                found.append(above.sigmoid_().sum(-1) / count)
        return torch.cat(found, 1)


def places(sizes: BankSizes, steps: int) -> list[tuple[int, int]]:
    """The widths and dilations of prototypes for series of so many steps."""
    return [(width, 2**i) for width in sizes.widths for i in range(_dilations(steps, width))]


def mean_steps(series: Tensor, padding: Tensor | None) -> int:
    """Of series [cases, length, channels], without those that are padded."""
    return series.shape[1] if padding is None else int((~padding).sum(1).float().mean())


def _dilations(steps: int, width: int) -> int:
    """How many powers of two a prototype is dilated by without being longer than a series."""
    return 1 + int(math.log2(max(1.0, (steps - 1) / (width - 1))))


def _random(many: int, channels: int, width: int, level: float, generator: torch.Generator) -> Tensor:
    """Prototypes [many, channels, width] with weights in 1 to MOST_CHANNELS channels, few more often than many."""
    shape = torch.randn(many, width, generator=generator, dtype=torch.float32)
    shape -= shape.mean(1, keepdim=True)
    if level:
        shape += level * torch.randn(many, 1, generator=generator, dtype=torch.float32)
    most = min(channels, MOST_CHANNELS)
    seen = torch.exp(_uniform(generator, many) * math.log(most + 1)).long().clamp(1, most)
    rank = _uniform(generator, many, channels).argsort(1).argsort(1)
    sign = 1.0 - 2.0 * (_uniform(generator, many, channels) < 0.5).float()
    return shape[:, None] * (sign * (rank < seen[:, None]))[:, :, None]


def _windows(random: Tensor, x: Tensor, hidden: Tensor | None, dilation: int, generator: torch.Generator) -> Tensor:
    """Windows of series [cases, channels, steps] in the channels that random prototypes see, less their level.

    Each begins where it fits, or as early as can be; in a channel that stands still the prototype stays random.
    """
    many, _, width = random.shape
    case = torch.randint(len(x), (many,), generator=generator)
    steps = torch.full((many,), x.shape[2]) if hidden is None else (~hidden).sum(1)[case]
    first = (_uniform(generator, many) * (steps - dilation * (width - 1)).clamp(min=1)).long()
    at = (first[:, None] + dilation * torch.arange(width)).clamp(max=x.shape[2] - 1)
    window = x[case].gather(2, at[:, None].expand(-1, x.shape[1], -1))
    window = window - window.mean(2, keepdim=True)
    moves = window.abs().amax(2, keepdim=True) > 1e-6
    return torch.where(moves, window * (random != 0), random)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers in [0, 1), in float32 whatever torch's default is."""
    return torch.rand(shape, generator=generator, dtype=torch.float32)
