"""The transformer that classifies long sequences of tokens, or pairs of them: that of the Long Range Arena in torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..nn import TransformerEncoderLayer
from ..primal import Primal, Spec, as_primal
from ..primal._spec import check_count
from .blocks import projections_as_linear
from .sizes import check_sizes

if TYPE_CHECKING:
    from ..data.sequences import SequenceSet


@dataclass(frozen=True)
class SequenceSizes(Spec):
    """A `SequenceClassifier` but for what its data and its mechanism say.

    Args:
        d_model, heads, layers, feedforward: sizes.
        vocabulary: ids that there are embeddings for; more than a set has do no harm.
        dropout: of embeddings, attention's output and feed-forward, and on the attention weights unless
            `attention_dropout` says otherwise.
        black_pixels_are_padding: whether pictures hide their pixels of value 0, as the reference code does: no query
            attends to them, and they are zeros in the mean. Other sequences are not touched by it.
    """

    d_model: int = 64
    heads: int = 2
    layers: int = 2
    feedforward: int = 128
    vocabulary: int = 512
    dropout: float = 0.1
    attention_dropout: float | None = None
    black_pixels_are_padding: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "d_model", "heads", "layers", "feedforward", "vocabulary")

    def config(self, data: SequenceSet, mechanism: str | Primal = "softmax", impl: str = "auto") -> SequenceConfig:
        """The model for a set."""
        if data.vocabulary > self.vocabulary:
            raise ValueError(f"{data.name} has {data.vocabulary} ids, the model embeddings for {self.vocabulary}")
        return SequenceConfig(
            **asdict(self), length=data.length, outputs=len(data.classes), pairs=data.pairs, mechanism=mechanism,
            impl=impl,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(SequenceSizes):
    """The settings of a `SequenceClassifier`; frozen, comparable, JSON both ways.

    Args:
        length: of padded sequences: so many positions there are, and by it the sum over tokens is divided.
        outputs: one score per class.
        pairs: whether a case is a pair of sequences.
        mechanism: a `Primal`, or the name of one.
        impl: the executor of the attention, as in `primaldual.attention`.

    >>> config = SequenceConfig(length=2048, outputs=10, mechanism="bn")
    >>> SequenceConfig.from_dict(config.to_dict()) == config
    True
    """

    length: int
    outputs: int
    pairs: bool = False
    mechanism: str | Primal = field(default_factory=Primal)
    impl: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mechanism", as_primal(self.mechanism))
        check_count("SequenceConfig", "length", self.length)
        check_count("SequenceConfig", "outputs", self.outputs)


class SequenceClassifier(nn.Module):
    """Embed tokens, add learned positions, encode with a norm before each part, average, predict.

        x_t = E[s_t] + p_t;   z = Σ_t mask_t norm(encoder(dropout(x)))_t / length;   y = V relu(U z + b) + c

    The mean is over the padded length: padding counts as zeros. So a batch may be cut to its longest sequence, and
    the scores are the same. Of a pair (a, b) of sequences z is (z_a, z_b, z_a z_b, z_a − z_b).

    >>> model = SequenceClassifier(SequenceConfig(length=64, outputs=10, mechanism="bn+sh"))
    >>> model(torch.randint(1, 17, (2, 50))).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.d_model)
        self.positions = nn.Parameter(torch.empty(config.length, config.d_model))
        for table in (self.tokens.weight, self.positions):
            nn.init.normal_(table, std=0.02)
        self.layers = nn.ModuleList(_block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.hidden = nn.Linear((4 if config.pairs else 1) * config.d_model, config.feedforward)
        self.head = nn.Linear(config.feedforward, config.outputs)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Scores [batch, classes].

        Args:
            tokens: [batch, length], or [batch, 2, length] for pairs: ids; there may be fewer than the model has
                positions for.
            padding: boolean, of the same shape: True where there is no token.
        """
        self._check(tokens, padding)
        if not self.config.pairs:
            return self.head(self.hidden(self.encode(tokens, padding)).relu())
        each = self.encode(tokens.flatten(0, 1), None if padding is None else padding.flatten(0, 1))
        return self.compare(*each.unflatten(0, (-1, 2)).unbind(1))

    def compare(self, a: Tensor, b: Tensor) -> Tensor:
        """Scores of pairs, of what `encode` gives of their first sequences and of their second ones."""
        return self.head(self.hidden(of_pair(a, b)).relu())

    def encode(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """The mean over the padded length, [batch, d_model], of sequences [batch, length]."""
        x = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        x = self.norm(x)
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        at_least = torch.promote_types(x.dtype, torch.float32)
        return (x.sum(1, dtype=at_least) / self.config.length).to(x.dtype)

    def _check(self, tokens: Tensor, padding: Tensor | None) -> None:
        expected = "[batch, 2, length]" if self.config.pairs else "[batch, length]"
        if tokens.dim() != 2 + self.config.pairs or (self.config.pairs and tokens.shape[1] != 2):
            raise ValueError(f"tokens must be {expected}, got {list(tokens.shape)}")
        if tokens.shape[-1] > self.config.length:
            raise ValueError(
                f"tokens must be {expected} with a length of at most {self.config.length}, which the model has "
                f"positions for, got {list(tokens.shape)}"
            )
        if padding is not None and (padding.shape != tokens.shape or padding.dtype != torch.bool):
            raise ValueError(
                f"padding must be boolean, of the tokens' shape {list(tokens.shape)}, got {padding.dtype} "
                f"{list(padding.shape)}"
            )


def of_pair(a: Tensor, b: Tensor) -> Tensor:
    """What a pair is classified by, [..., 4 · d_model], of the means [..., d_model] of both."""
    return torch.cat([a, b, a * b, a - b], -1)


def _block(config: SequenceConfig) -> TransformerEncoderLayer:
    """A norm, attention, a norm, and linear – GELU – dropout – linear; projections drawn as plain linear layers."""
    layer = TransformerEncoderLayer(
        config.d_model, config.heads, config.feedforward, config.dropout, "gelu", batch_first=True, norm_first=True,
        mechanism=config.mechanism, impl=config.impl, left_padding=False,
    )  # fmt: skip
    projections_as_linear(layer.self_attn)
    if config.attention_dropout is not None:
        layer.self_attn.dropout = config.attention_dropout
    return layer
