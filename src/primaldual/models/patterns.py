"""A transformer for series as they are today: convolutions see patterns, attention sets them beside each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, max_pool1d

from ..nn import TransformerEncoderLayer
from ..primal import Primal, Spec, as_primal
from ..primal._spec import check_choice, check_count
from .config import TASKS
from .dropout import DrawnDropout
from .sizes import check_sizes

if TYPE_CHECKING:
    from ..data import Dataset

POOLINGS = ("mean", "max", "attention")
EMPTY = -1e4
"""Of a padded token, where the largest is taken."""


@dataclass(frozen=True)
class PatternSizes(Spec):
    """A `PatternTransformer` but for what its data and its mechanism say.

    Args:
        widths: of the first convolutions, odd; each gives its share of d_model.
        blocks: convolutions with a residual after them.
        tokens: about so many are left of a long series: the first block is followed by a maximum over steps.
        d_model, heads, layers, feedforward: sizes; there may be no layer of attention.
        pooling: what a series is told by: "mean", "max" of its tokens, or "attention", one learned query per head.
        positions: whether places are learned.
        instance: whether each series is standardised by itself, on top of its channels.
        dropout: of convolutions and encoder; what is classified loses twice as much.
        attention_dropout: on the attention weights, where it costs more than the rest of a step on a CPU.
    """

    widths: tuple[int, ...] = (3, 9, 21)
    blocks: int = 2
    tokens: int = 64
    d_model: int = 64
    heads: int = 4
    layers: int = 2
    feedforward: int = 128
    pooling: tuple[str, ...] = ("mean", "max")
    positions: bool = True
    instance: bool = False
    dropout: float = 0.1
    attention_dropout: float | None = 0.0

    def __post_init__(self) -> None:
        for name in ("widths", "pooling"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_sizes(self, "d_model", "heads", "feedforward", "tokens")
        for name in ("layers", "blocks"):
            check_count(type(self).__name__, name, getattr(self, name), least=0)
        if not self.widths or any(not isinstance(w, int) or w < 1 or w % 2 == 0 for w in self.widths):
            raise ValueError(f"{type(self).__name__}: widths must be odd numbers of steps, got {self.widths!r}")
        if len(self.widths) > self.d_model:
            raise ValueError(f"{type(self).__name__}: {len(self.widths)} widths share d_model={self.d_model} channels")
        if not self.pooling:
            raise ValueError(f"{type(self).__name__}: pooling must name some of {', '.join(POOLINGS)}")
        for one in self.pooling:
            check_choice(type(self).__name__, "pooling", one, POOLINGS)

    def config(self, data: Dataset, mechanism: str | Primal = "softmax", impl: str = "auto") -> PatternConfig:
        """The model for a data set."""
        return PatternConfig(
            **asdict(self), channels=data.channels, length=data.length, outputs=data.outputs, mechanism=mechanism,
            task=data.kind, impl=impl,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PatternConfig(PatternSizes):
    """The settings of a `PatternTransformer`; frozen, comparable, JSON both ways.

    Args:
        channels, length: of the series, after padding.
        outputs: one score per class; 1 for regression.
        mechanism: a `Primal`, or the name of one.
        task: "classification" or "regression".
        impl: the executor of the attention, as in `primaldual.attention`.

    >>> config = PatternConfig(channels=12, length=26, outputs=9, mechanism="bn")
    >>> PatternConfig.from_dict(config.to_dict()) == config
    True
    """

    channels: int
    length: int
    outputs: int
    mechanism: str | Primal = field(default_factory=Primal)
    task: str = "classification"
    impl: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mechanism", as_primal(self.mechanism))
        for name in ("channels", "length", "outputs"):
            check_count("PatternConfig", name, getattr(self, name))
        check_choice("PatternConfig", "task", self.task, TASKS)

    @property
    def stride(self) -> int:
        """Steps of a token."""
        return max(1, round(self.length / self.tokens))

    @property
    def drops_attention(self) -> bool:
        """Whether there is dropout on attention weights."""
        return (self.dropout if self.attention_dropout is None else self.attention_dropout) > 0

    @property
    def products(self) -> int:
        """Multiplications of one series on its way to the scores, but for those of the attention itself."""
        d, tokens = self.d_model, -(-self.length // self.stride)
        wide = self.channels * d * sum(self.widths) // len(self.widths) + d * d + 5 * d * d * (self.blocks > 0)
        each = 5 * d * d * max(0, self.blocks - 1) + self.layers * (4 * d * d + 2 * d * self.feedforward)
        return self.length * wide + tokens * each


class PatternTransformer(nn.Module):
    """Convolve, pool steps to tokens, encode, pool tokens, predict.

        c = U [w * s for w in widths];   x_t = max_{steps of t} block(c) + p_t;   y = V dropout(pool(norm(encoder(x))))

    A block is  c + dropout(conv(gelu(batch norm(c)))),  a layer of the encoder has its norms before its parts.

    >>> model = PatternTransformer(PatternConfig(channels=3, length=200, outputs=4, mechanism="bn+sh"))
    >>> model(torch.randn(2, 200, 3)).shape
    torch.Size([2, 4])

    Attributes:
        generator: what series are augmented by in training; None for the one that the process shares.
    """

    generator: torch.Generator | None = None

    def __init__(self, config: PatternConfig) -> None:
        super().__init__()
        self.config = config
        d, many = config.d_model, len(config.widths)
        shares = [d // many + (i < d % many) for i in range(many)]
        self.stem = nn.ModuleList(
            nn.Conv1d(config.channels, share, width, padding=width // 2)
            for share, width in zip(shares, config.widths, strict=True)
        )
        self.mix = nn.Conv1d(d, d, 1)
        self.blocks = nn.ModuleList(_Convolution(d, config.dropout) for _ in range(config.blocks))
        tokens = -(-config.length // config.stride)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, d)) if config.positions else None
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(d)
        attends = "attention" in config.pooling
        self.queries = nn.Parameter(torch.randn(config.heads, d) * d**-0.5) if attends else None
        self.dropout = DrawnDropout(min(0.9, 2 * config.dropout))
        self.head = nn.Linear(d * (len(config.pooling) + (config.heads - 1) * attends), config.outputs)

    def forward(self, series: Tensor, padding: Tensor | None = None) -> Tensor:
        """Scores [batch, classes], or predictions [batch] for regression.

        Args:
            series: [batch, length, channels]; what stands at padded steps does not matter.
            padding: [batch, length], True after the end of a series.
        """
        expected = (self.config.length, self.config.channels)
        if series.dim() != 3 or series.shape[1:] != expected:
            raise ValueError(
                f"series must be [batch, length, channels] = [batch, {expected[0]}, {expected[1]}], got "
                f"{list(series.shape)}; pad or cut them to the length of the model"
            )
        y = self.head(self.dropout(self.encode(series, padding)))
        return y.squeeze(-1) if self.config.task == "regression" else y

    def encode(self, series: Tensor, padding: Tensor | None = None) -> Tensor:
        """What a series is told by, [batch, features]."""
        x, stride = series, self.config.stride
        if self.config.instance:
            x = standardised(x, padding)
        x = _cut(x.transpose(1, 2), padding)
        x = _cut(self.mix(torch.cat([convolution(x) for convolution in self.stem], 1)), padding)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 0:
                x, padding = _tokens(x, padding, stride)
            x = _cut(x, padding)
        if not self.blocks:
            x, padding = _tokens(x, padding, stride)
        x = x.transpose(1, 2)
        if self.positions is not None:
            x = x + self.positions
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self._pooled(self.norm(x), padding)

    def _pooled(self, x: Tensor, padding: Tensor | None) -> Tensor:
        seen = torch.ones_like(x[..., :1]) if padding is None else (~padding).unsqueeze(-1).to(x)
        found = []
        for how in self.config.pooling:
            if how == "mean":
                found.append((x * seen).sum(1) / seen.sum(1).clamp(min=1))
            elif how == "max":
                found.append(torch.where(seen > 0, x, EMPTY).amax(1))
            else:
                scores = torch.where(seen > 0, x @ self.queries.T, EMPTY)  # type: ignore[union-attr]
                found.append((scores.softmax(1).transpose(1, 2) @ x).flatten(1))
        return torch.cat(found, 1)


class _Convolution(nn.Module):
    """x + dropout(conv(gelu(batch norm(x)))), [batch, channels, steps]."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)
        self.convolution = nn.Conv1d(channels, channels, 5, padding=2)
        self.dropout = DrawnDropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.convolution(gelu(self.norm(x))))


def _layer(config: PatternConfig) -> TransformerEncoderLayer:
    layer = TransformerEncoderLayer(
        config.d_model, config.heads, config.feedforward, config.dropout, "gelu", batch_first=True, norm_first=True,
        mechanism=config.mechanism, impl=config.impl,
    )  # fmt: skip
    layer.dropout, layer.dropout1, layer.dropout2 = (DrawnDropout(config.dropout) for _ in range(3))
    if config.attention_dropout is not None:
        layer.self_attn.dropout = config.attention_dropout
    return layer


def _tokens(x: Tensor, padding: Tensor | None, stride: int) -> tuple[Tensor, Tensor | None]:
    """The largest of every `stride` steps of [batch, channels, steps], and which of them have no step at all."""
    if stride == 1:
        return x, padding
    hidden = x if padding is None else x.masked_fill(padding.unsqueeze(1), EMPTY)
    return max_pool1d(hidden, stride, ceil_mode=True), None if padding is None else padding[:, ::stride]


def _cut(x: Tensor, padding: Tensor | None) -> Tensor:
    """[batch, channels, steps] with 0 at padded steps."""
    return x if padding is None else x.masked_fill(padding.unsqueeze(1), 0.0)


def standardised(series: Tensor, padding: Tensor | None, least: float = 1e-2) -> Tensor:
    """Every channel of [batch, length, channels] with mean 0 and deviation 1 over the steps of its own series.

    A channel that hardly moves is not blown up: `least`, in deviations of the training set, is added to its own.
    """
    seen = torch.ones_like(series[..., :1]) if padding is None else (~padding).unsqueeze(-1).to(series)
    count = seen.sum(1, keepdim=True).clamp(min=1)
    centred = (series - (series * seen).sum(1, keepdim=True) / count) * seen
    return centred / ((centred.square().sum(1, keepdim=True) / count).sqrt() + least)
