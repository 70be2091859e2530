"""A language model of today's kind, with any mechanism for its attention."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from ..nn import MultiheadAttention
from ..nn.decoding import attended, cache_of, rows_of
from ..ops import UnsupportedError
from ..ops.decoding import AttentionCache, Cache, Piece
from ..primal import Primal, Rotary, Spec, as_primal
from ..primal._spec import check_choice, check_count
from .sizes import check_sizes

POSITIONS = ("rotary", "learned", "none")


@dataclass(frozen=True)
class LanguageSizes(Spec):
    """A `LanguageModel` but for its text and its mechanism.

    The sizes that `LANGUAGE_SIZES` has names for, with their parameters for bytes without learned positions. Context is
    1,024, and 256 for the tiny one, which is to try things out on a CPU.

        name      layers  d_model  heads  feedforward   parameters
        tiny           4      128      4          352      836,736
        small          6      384      6         1024   10,720,128
        medium         8      512      8         1408   25,829,888
        large         12      768     12         2048   85,150,464
        xlarge        27     1024     16         2816  347,134,976

    Args:
        d_model, heads, layers, feedforward: sizes; `feedforward` is that of each of the two products of a SwiGLU.
        context: tokens that the model is trained on at once; with learned positions it takes no more.
        positions: "rotary", as a part of the mechanism, after its convolutions, where it has no rotary positions
            already; "learned", a vector for every place, which is added to the tokens; or "none".
    """

    d_model: int = 384
    heads: int = 6
    layers: int = 6
    feedforward: int = 1024
    context: int = 1024
    positions: str = "rotary"

    def __post_init__(self) -> None:
        check_sizes(self, "d_model", "heads", "layers", "feedforward", "context")
        check_choice(type(self).__name__, "positions", self.positions, POSITIONS)

    def config(self, vocabulary: int, mechanism: str | Primal = "softmax", impl: str = "auto") -> LanguageConfig:
        """The model for a text with so many different tokens."""
        return LanguageConfig(**asdict(self), vocabulary=vocabulary, mechanism=mechanism, impl=impl)


LANGUAGE_SIZES = {
    "tiny": LanguageSizes(128, 4, 4, 352, context=256),
    "small": LanguageSizes(),
    "medium": LanguageSizes(512, 8, 8, 1408),
    "large": LanguageSizes(768, 12, 12, 2048),
    "xlarge": LanguageSizes(1024, 16, 27, 2816),
}


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(LanguageSizes):
    """The settings of a `LanguageModel`; frozen, comparable, JSON both ways.

    Args:
        vocabulary: different tokens.
        mechanism: a `Primal` with a causal form, or the name of one.
        impl: the executor of the attention, as in `primaldual.attention`.

    >>> config = LanguageConfig(vocabulary=256, mechanism="sh")
    >>> LanguageConfig.from_dict(config.to_dict()) == config
    True
    """

    vocabulary: int
    mechanism: str | Primal = field(default_factory=Primal)
    impl: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mechanism", as_primal(self.mechanism))
        check_count("LanguageConfig", "vocabulary", self.vocabulary)
        refusal = self.primal.causal_refusal(self.heads)
        if refusal or self.primal.residual:
            reason = refusal or "the block has the residual already; give a Primal with residual=False"
            raise ValueError(f"a language model needs a mechanism with a causal form: {reason}")

    @property
    def primal(self) -> Primal:
        """The mechanism of the model's layers, with its positions."""
        given = as_primal(self.mechanism)
        if self.positions != "rotary" or any(isinstance(one, Rotary) for one in given.inputs):
            return given
        return replace(given, inputs=(*given.token_maps, Rotary(), *given.point_maps))


class LanguageModel(nn.Module):
    """Which token comes next? A norm before each part, SwiGLU, and one table for the tokens on both sides.

        x_t = E[s_t] (+ p_t);   y_t = E norm(x_t);   in each layer between them
        x ← x + attention(norm(x));   x ← x + D (silu(G z) ⊙ U z), z = norm(x)

    Norms are RMS norms, linear maps have no bias, and there is no dropout. Weights start with a standard deviation of
    0.02, those of the two products that add to x with 0.02 / √(2 layers). Where the weights are of 16 bits, so are the
    products; x and the norms stay in float32, as under `torch.autocast`.

    >>> model = LanguageModel(LanguageConfig(d_model=32, heads=2, layers=2, feedforward=64, vocabulary=256))
    >>> model(torch.randint(256, (2, 50))).shape
    torch.Size([2, 50, 256])
    """

    positions: nn.Parameter | None

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.d_model)
        learned = config.positions == "learned"
        positions = nn.Parameter(torch.empty(config.context, config.d_model)) if learned else None
        self.register_parameter("positions", positions)
        self.layers = nn.ModuleList(LanguageBlock(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.d_model)
        for table in (self.tokens.weight, positions):
            if table is not None:
                nn.init.normal_(table, std=START)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores [batch, length, vocabulary] of the token that follows each one of `tokens` [batch, length]."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [batch, length], got {list(tokens.shape)}")
        x = self.tokens(tokens)
        if self.positions is not None:
            if tokens.shape[1] > len(self.positions):
                raise ValueError(
                    f"tokens must be [batch, length] with a length of at most {len(self.positions)}, which there are "
                    f"positions for, got {list(tokens.shape)}"
                )
            x = x + self.positions[: tokens.shape[1]]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        for layer in self.layers:
            x = layer(x)
        return linear(self.norm(x).to(self.tokens.weight.dtype), self.tokens.weight)

    def cache(
        self, batch: int, *, length: int | None = None, rewind: int = 0, dtype: torch.dtype | None = None
    ) -> Cache:
        """An empty cache for `decode`, of all layers; arguments as in `MultiheadAttention.cache`."""
        rows = rows_of(batch, self.tokens.weight, length, rewind)
        for part, known in ((self, LanguageModel), *((layer, LanguageBlock) for layer in self.layers)):
            if not isinstance(part, known) or type(part).forward is not known.forward:
                raise UnsupportedError(
                    f"this cannot be decoded with a cache: {type(part).__name__} has a forward of its own, and nothing "
                    f"says what it would do with one more token"
                )
        return Cache(rows, [cache_of(layer.self_attn, rows, dtype) for layer in self._blocks()])

    def _blocks(self) -> list[LanguageBlock]:
        return [layer for layer in self.layers if isinstance(layer, LanguageBlock)]

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Cache, *, padding: Tensor | None = None, last: bool = False) -> Tensor:
        """Scores [batch, length, vocabulary] of what follows the next tokens of every row, which the cache has then.

        `padding` [batch, length] is True at tokens that are none, at the left or the right of a row. With `last` the
        scores are those after the last token of each row alone, [batch, vocabulary].

        >>> model = LanguageModel(LanguageConfig(d_model=32, heads=2, layers=2, feedforward=64, vocabulary=256))
        >>> cache = model.cache(1)
        >>> for tokens in torch.randint(256, (1, 50)).split([47, 1, 1, 1], dim=1):
        ...     scores = model.decode(tokens, cache)
        >>> cache.lengths
        tensor([50])
        """
        if tokens.dim() != 2 or tokens.shape[0] != cache.batch or len(cache.layers) != len(self.layers):
            raise ValueError(
                f"tokens must be [batch, length] for a cache of {cache.batch} rows and {len(cache.layers)} layers, and "
                f"this model has {len(self.layers)} layers; got {list(tokens.shape)}"
            )
        piece = cache.rows.piece(tokens.shape[1], padding)
        x = self.tokens(piece.ordered(tokens))
        if self.positions is not None:
            x = x + self.positions[self._places(cache, piece)]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        for layer, kept in zip(self._blocks(), cache.layers, strict=True):
            x = layer.decode(x, kept, piece)
        cache.rows.advance(piece)
        if last:
            x = piece.last(x)
        scores = linear(self.norm(x).to(self.tokens.weight.dtype), self.tokens.weight)
        return scores if last else piece.put_back(scores)

    def _places(self, cache: Cache, piece: Piece) -> Tensor:
        """Where tokens stand, as far as there are learned positions."""
        assert self.positions is not None
        most = len(self.positions)
        if not torch.compiler.is_compiling() and (piece.end or cache.rows.most or 0) > most:
            raise ValueError(
                f"there are learned positions for {most} tokens, and the cache is to hold "
                f"{piece.end or cache.rows.most}; decode fewer, or give a length of at most {most}"
            )
        return piece.places.clamp(max=most - 1)  # beyond them there is padding alone


class LanguageBlock(nn.Module):
    """Attention, then a SwiGLU, each after a norm and added to what it is given."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(config.d_model), RmsNorm(config.d_model)
        self.self_attn = MultiheadAttention(
            config.d_model, config.heads, bias=False, batch_first=True, mechanism=config.primal, impl=config.impl
        )
        self.gate_and_up = nn.Linear(config.d_model, 2 * config.feedforward, bias=False)
        self.down = nn.Linear(config.feedforward, config.d_model, bias=False)
        added = START / math.sqrt(2 * config.layers)
        assert self.self_attn.in_proj_weight is not None
        for weight, std in (
            (self.self_attn.in_proj_weight, START), (self.gate_and_up.weight, START),
            (self.self_attn.out_proj.weight, added), (self.down.weight, added),
        ):  # fmt: skip
            nn.init.normal_(weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model], the same out."""
        z = self.norm1(x).to(self.down.weight.dtype)
        x = x + self.self_attn(z, z, z, is_causal=True, need_weights=False)[0]
        return self._fed_forward(x)

    def decode(self, x: Tensor, cache: AttentionCache, piece: Piece) -> Tensor:
        """The same of the next tokens."""
        z = self.norm1(x).to(self.down.weight.dtype)
        return self._fed_forward(x + attended(self.self_attn, z, cache, piece))

    def _fed_forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(self.norm2(x).to(self.down.weight.dtype)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


class RmsNorm(nn.RMSNorm):
    """x ↦ x / √(mean(x²) + ε) ⊙ γ in x's dtype, whatever that of γ."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


START = 0.02
"""Standard deviation of the weights at the start."""
