"""Multi-head attention with any mechanism, in place of torch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ..dual import Expansion
from ..ops import EXECUTORS, CausalFormError, checks, layer, masks, per_token
from ..ops.decoding import Cache
from ..primal import Primal, as_primal
from ..primal.shared_keys import check_groups, of_queries
from . import decoding
from .checkpoints import load_projections
from .made import MadeOfInput
from .names import name_of
from .projection import ConvProjection, DepthwiseConv


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with the attention that is dual to a primal layer.

    Constructor, `forward`, return values, defaults and parameter names are torch's, so a torch state dict loads into
    every mechanism that learns nothing of its own. Two things differ from torch: a query that sees no key gets zeros
    (torch: NaN), and `is_causal=True` needs no mask beside it.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as
            torch. `add_bias_kv` and `add_zero_attn` exist for softmax attention alone.
        mechanism: a name of `primaldual.mechanisms()`, or a `Primal`. Its `bias` adds a learned vector per head
            (`mechanism_bias`), its `residual` the query input to the output. What it learns is in `learned`.
        projection: "linear" as torch; "shared", one W^proj for queries and keys (Eqn. dual-model-res before it is
            relaxed; values have their own); or a `ConvProjection`.
        impl: "auto"; an executor of the attention, as in `primaldual.attention`; or a route of the whole layer, as
            `plan(x).explain()` lists them.
        scale: the factor on the scores, 1/√head_dim unless given.
        num_kv_heads: heads of keys and values, num_heads unless given, which they divide: each is shared by a group of
            query heads that stand side by side, so its scale is theirs. The projections then are `q_proj_weight`
            [E, E], `k_proj_weight` and `v_proj_weight` [num_kv_heads·head_dim, kdim or vdim], and `in_proj_bias`, these
            three after one another. State dicts with `q_proj.weight`, … load too, and so do those with another number
            of key/value heads, where the heads of a group are equal.

        left_padding: whether a row begins with the first token that its key padding mask leaves; False where all begin
            with token 0, hidden or not. As in `primaldual.attention`.

    >>> layer = MultiheadAttention(64, 8, batch_first=True, mechanism="bn+sh")
    >>> x = torch.randn(2, 100, 64)
    >>> output, weights = layer(x, x, x)
    >>> output.shape, weights.shape
    (torch.Size([2, 100, 64]), torch.Size([2, 100, 100]))
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    mechanism_bias: nn.Parameter | None
    convolutions: nn.ModuleDict | None

    learns_values: ClassVar[bool] = True
    """Whether the value projection gives values; a layer that solves for them projects to targets."""

    # torch's encoder puts its own fused softmax in the place of an attention for which this is True
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str | Primal = "softmax",
        projection: Literal["linear", "shared"] | ConvProjection = "linear",
        impl: str = "auto",
        scale: float | None = None,
        num_kv_heads: int | None = None,
        left_padding: bool = True,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a positive multiple of num_heads, got embed_dim={embed_dim}, num_heads={num_heads}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout!r}")
        known = dict.fromkeys(("auto", *EXECUTORS, *layer.ROUTES))
        if impl not in known:
            raise ValueError(f"impl must be one of {', '.join(known)}; got {impl!r}")
        primal = as_primal(mechanism)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_groups(num_heads, self.num_kv_heads)
        self.mechanism_name = name_of(primal)
        self.primal = replace(primal, training_set=of_queries(primal.training_set, num_heads, self.num_kv_heads))
        self.primal.training_set.head_scales(num_heads)  # raises when scales and heads disagree
        is_softmax = self.primal == Primal(bias=self.primal.bias, residual=self.primal.residual)
        if (add_bias_kv or add_zero_attn) and not is_softmax:
            raise ValueError(f"add_bias_kv and add_zero_attn exist for softmax attention, not for {self.primal!r}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kv_dim = self.num_kv_heads * self.head_dim
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first, self.add_zero_attn, self.impl = dropout, batch_first, add_zero_attn, impl
        checks.scale(scale, self.primal.features)
        self.scale, self.left_padding = scale, left_padding
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._routes: dict[object, tuple[str, Expansion]] = {}  # by the kind of call, what was planned before
        self._make_projections(projection, bias, factory)
        for name in ("bias_k", "bias_v"):
            extra = nn.Parameter(torch.empty(1, 1, self.kv_dim, **factory)) if add_bias_kv else None
            self.register_parameter(name, extra)
        learned = self.primal.learned(num_heads, self.head_dim, self.num_kv_heads)
        self.learned = nn.ParameterDict({name: nn.Parameter(x.to(**factory)) for name, x in learned.items()})
        self.made = nn.ModuleDict(
            {name: MadeOfInput(part, self.kdim if part.of == "key" else embed_dim, **factory)
             for name, part in self.primal.made(num_heads, self.head_dim, self.num_kv_heads).items()}
        )  # fmt: skip
        fixed = self.primal.features.state(self.head_dim)
        for name, x in fixed.items():
            self.register_buffer(f"feature_{name}", x.to(device=device, dtype=dtype or torch.get_default_dtype()))
        b = nn.Parameter(torch.zeros(num_heads, self.head_dim, **factory)) if self.primal.bias else None
        self.register_parameter("mechanism_bias", b)
        self._reset_parameters()

    def _make_projections(self, projection: str | ConvProjection, bias: bool, factory: dict[str, Any]) -> None:
        E, kv, same = self.embed_dim, self.kv_dim, self.kdim == self.vdim == self.kv_dim == self.embed_dim
        self.shared = projection == "shared"
        if self.shared and kv != E:
            raise ValueError(
                f"projection='shared' is one projection of queries and keys, which needs as many heads of both; got "
                f"num_kv_heads={self.num_kv_heads} and num_heads={self.num_heads}"
            )
        if self.shared and not same:
            raise ValueError(
                f"projection='shared' needs kdim and vdim equal to embed_dim={E}, got {self.kdim}, {self.vdim}"
            )
        if not isinstance(projection, ConvProjection) and projection not in ("linear", "shared"):
            raise ValueError(f"projection must be 'linear', 'shared' or a ConvProjection, got {projection!r}")
        rows = (1 if self.shared else 2) * kv + E
        sizes: dict[str, tuple[int, ...] | None] = {"in_proj_weight": (rows, E) if same else None}
        sizes |= {"q_proj_weight": None if same else (E, E)}
        sizes |= {
            "k_proj_weight": None if same else (kv, self.kdim),
            "v_proj_weight": None if same else (kv, self.vdim),
        }
        sizes |= {"in_proj_bias": (rows,) if bias else None}
        for name, size in sizes.items():
            self.register_parameter(name, None if size is None else nn.Parameter(torch.empty(size, **factory)))
        self.out_proj = nn.Linear(E, E, bias=bias, **factory)
        self.convolutions = None
        if isinstance(projection, ConvProjection):
            self.convolutions = nn.ModuleDict(
                {n: DepthwiseConv(c, projection, **factory) for n, c in (("q", E), ("k", self.kdim), ("v", self.vdim))}
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        load_projections(self, state_dict, prefix, error_messages=others[-1])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, mechanism={self.mechanism_name}"]
        parts += [f"num_kv_heads={self.num_kv_heads}"] if self.num_kv_heads != self.num_heads else []
        parts += [f"{n}={size}" for n, size in (("kdim", self.kdim), ("vdim", self.vdim)) if size != self.embed_dim]
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        parts += ["projection='shared'"] if self.shared else []
        parts += [] if self.scale is None else [f"scale={self.scale:g}"]
        parts += [] if self.left_padding else ["left_padding=False"]
        parts += [] if self.impl == "auto" else [f"impl={self.impl!r}"]
        return ", ".join([*parts, f"batch_first={self.batch_first}"])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        query_offset: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch: query [L, N, E] ([N, L, E] with batch_first, [L, E] unbatched), key and value likewise.

        Args:
            query, key, value: inputs, before the projections.
            key_padding_mask: [N, S]; True or −inf hides, other floats are added to the scores. What counts tokens does
                so from the first valid one of each row, as in `primaldual.attention`.
            need_weights: also return the weights: a matrix for every head, where outputs alone need none.
            attn_mask: [L, S] or [N·heads, L, S].
            average_attn_weights: [N, L, S] instead of [N, heads, L, S].
            is_causal: query i sees keys up to token query_offset + i (without an offset the first query the first key,
                also where they are not equally many); no mask is needed. A mask beside it applies too, as in
                `primaldual.attention`.
            query_padding_mask: [N, L]; True or −inf marks queries that are padding, which convolutions must not mix
                into others. Where it is not given and query and key have the same shape, `key_padding_mask` serves; a
                mask that is False everywhere says that no query is padding.
            query_offset: the place of the first query in the sequence of keys, as in `primaldual.attention`.
        """
        if isinstance(query, Tensor) and query.is_nested:
            return self._nested(query, key, value, is_causal), None
        problem = self.state(
            query, key, value, key_padding_mask, need_weights, attn_mask, is_causal, query_padding_mask, query_offset
        )
        heads, weights = self._attend(problem)
        if self.mechanism_bias is not None:
            heads = heads + self.mechanism_bias[:, None]
        output = layer.project_output(self.out_proj, heads.transpose(1, 2).flatten(2))
        if self.primal.residual:
            output = output + problem.x
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if query.dim() == 2:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def state(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, is_causal: bool = False,
        query_padding_mask: Tensor | None = None, query_offset: int = 0,
    ) -> layer.LayerProblem:  # fmt: skip
        """The arguments of `forward`, checked, as the problem that is planned and computed."""
        given = {"query": query, "key": key, "value": value}
        checks.inputs(**given)
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(
                "query, key and value must all be 3-D (batched) or all 2-D (unbatched), got "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        for name, tensor in given.items():
            checks.parameters(name, tensor, self.out_proj.weight)
        checks.mask("key_padding_mask", key_padding_mask, query)
        checks.mask("query_padding_mask", query_padding_mask, query)
        checks.mask("attn_mask", attn_mask, query)
        x = self._batch_first(query)  # what was one tensor stays one, which one product can project
        of_key = x if key is query else self._batch_first(key)
        of_value = of_key if value is key else self._batch_first(value)
        paddings = self._paddings(x, of_key, key_padding_mask, query_padding_mask, batched=query.dim() == 3)
        self._check_inputs(x, of_key, of_value)
        mask = self._mask_by_head(attn_mask, x, of_key)
        self._check_mixing(mask, is_causal, query_offset)
        fixed = {n: getattr(self, f"feature_{n}") for n in self.primal.features.fixed}
        squash = self._squash(x)
        tokens = {
            n: made(x if made.of == "query" else of_key)
            for n, made in self.made.items()
            if squash is None or n != "gate"
        }
        gates = {n: tokens.pop(n) for n in ("gate",) if n in tokens}
        return layer.LayerProblem(
            self, x, of_key, of_value, *paddings, mask, is_causal, self.dropout if self.training else 0.0,
            dict(self.learned.items()) | fixed | tokens, need_weights, *self._extra_keys_and_values(), query_offset,
            per_token.gate(self.primal, gates) if gates else None, squash,
        )  # fmt: skip

    def _squash(self, x: Tensor) -> layer.Squash | None:
        """The affine map whose sigmoid is the gate, where no one is asked for more than that."""
        made = self.made["gate"] if "gate" in self.made else None  # noqa: SIM401 – it is no dictionary
        if isinstance(made, MadeOfInput) and made.plain and per_token.squashes(self.primal, x):
            return layer.Squash(made.weight, made.bias)
        return None

    def plan(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **options: Any
    ) -> layer.LayerPlan:
        """What `forward` would do with the same arguments, and why, without doing it.

        Keys and values are the queries unless given; weights are not asked for unless `need_weights=True` is.

        >>> layer = MultiheadAttention(64, 8, batch_first=True, mechanism="sh")
        >>> layer.plan(torch.randn(2, 100, 64)).route
        'pooled'
        """
        key = query if key is None else key
        value = key if value is None else value
        return layer.choose(self.state(query, key, value, **({"need_weights": False} | options)))

    def cache(
        self, batch: int, *, length: int | None = None, rewind: int = 0, dtype: torch.dtype | None = None
    ) -> Cache:  # fmt: skip
        """An empty cache for `decode`: of every head a key and a value for each of its points.

        Args:
            batch: rows.
            length: the most tokens of a row, whose memory is allocated now and written in place, without looking at
                values: so a step can be captured in a graph, or compiled. Unless given, the cache grows.
            rewind: how many of the last tokens `cache.crop` can always take off; these are kept beside the points.
            dtype: of keys and values, that of the weights unless given.
        """
        rows = decoding.rows_of(batch, self.out_proj.weight, length, rewind)
        return Cache(rows, [decoding.cache_of(self, rows, dtype)])

    def decode(self, x: Tensor, cache: Cache, *, padding: Tensor | None = None) -> Tensor:
        """What causal self-attention gives for the next tokens x of every row, [N, L, E] with batch_first.

        One call takes a prompt, a piece of it or a single token, and adds it to the cache. `padding` [N, L] is True at
        tokens that are none, at the left or the right of a row: these take no place, and their outputs are zero.

        >>> layer = MultiheadAttention(64, 8, batch_first=True, mechanism="sh").eval()
        >>> x, cache = torch.randn(2, 100, 64), layer.cache(2)
        >>> prompt, step = layer.decode(x[:, :99], cache), layer.decode(x[:, 99:], cache)
        >>> whole, _ = layer(x, x, x, is_causal=True, need_weights=False)
        >>> torch.allclose(torch.cat([prompt, step], 1), whole, atol=1e-5)
        True
        """
        return decoding.decode(self, x, cache, padding)

    def _attend(self, problem: layer.LayerProblem) -> tuple[Tensor, Tensor | None]:
        """Head outputs [N, heads, L, head_dim], and the weights where they are asked for."""
        return layer.attend(problem, self._routes)

    def _extra_keys_and_values(self) -> tuple[Tensor | None, Tensor | None]:
        """Softmax attention's extra keys and values [1, n, E]: the learned ones, then zeros."""
        if self.bias_k is None or self.bias_v is None:
            zeros = self.out_proj.weight.new_zeros(1, 1, self.kv_dim) if self.add_zero_attn else None
            return zeros, zeros
        rows = int(self.add_zero_attn)
        return pad(self.bias_k, (0, 0, 0, rows)), pad(self.bias_v, (0, 0, 0, rows))

    def split(self, x: Tensor) -> Tensor:
        """[N, L, heads·dim] to [N, heads, L, dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    @property
    def packed(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of queries, keys and values, where one product gives them all."""
        return None if self.in_proj_weight is None or self.shared else (self.in_proj_weight, self.in_proj_bias)

    def weights_of(self, part: Literal["q", "k", "v"]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a projection."""
        E, kv = self.embed_dim, self.kv_dim
        row, end = {"q": (0, E), "k": (0 if self.shared else E, E if self.shared else E + kv), "v": (-kv, None)}[part]
        bias = None if self.in_proj_bias is None else self.in_proj_bias[row:end]
        if self.in_proj_weight is not None:
            return self.in_proj_weight[row:end], bias
        return getattr(self, f"{part}_proj_weight"), bias

    def project(
        self, x: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, query_padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, L, E], keys and values [N, L, num_kv_heads·head_dim] of inputs [N, L, E]."""
        if self.convolutions is None:
            if x is key and key is value and self.packed is not None:
                q, k, v = linear(x, *self.packed).chunk(3, dim=-1)
                return q, k, v
        else:  # padded tokens are zero before a convolution
            x = masks.without_padding(x, query_padding)
            key, value = (masks.without_padding(t, padding) for t in (key, value))
            x, key, value = (self.convolutions[n](t) for n, t in (("q", x), ("k", key), ("v", value)))
        return (
            linear(x, *self.weights_of("q")),
            linear(key, *self.weights_of("k")),
            linear(value, *self.weights_of("v")),
        )

    def _paddings(
        self, x: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, batched: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The padding masks [N, S] and [N, L] of key and query."""
        if not batched:
            key_mask, query_mask = (None if m is None else m.unsqueeze(0) for m in (key_mask, query_mask))
        for name, mask, of in (("key_padding_mask", key_mask, key), ("query_padding_mask", query_mask, x)):
            if mask is not None:
                masks.check_padding(name, mask, (of.shape[0], of.shape[1]))
        if query_mask is None and x.shape == key.shape:  # torch's callers have no way to give it
            query_mask = key_mask
        return key_mask, query_mask

    def _check_mixing(self, mask: Tensor | None, is_causal: bool, query_offset: int) -> None:
        """Refuse what convolutional projections would leak."""
        if self.convolutions is None:
            return
        checks.query_offset(query_offset, [self.convolutions["q"].spec])
        if is_causal:
            raise CausalFormError("is_causal=True: a ConvProjection lets a token depend on later ones")
        if mask is not None:
            masks.refuse_mixing(mask, [self.convolutions["q"].spec])

    def _check_inputs(self, x: Tensor, key: Tensor, value: Tensor) -> None:
        sizes = (self.embed_dim, self.kdim, self.vdim)
        if (x.shape[2], key.shape[2], value.shape[2]) != sizes:
            raise ValueError(
                f"query, key and value must have {sizes[0]}, {sizes[1]} and {sizes[2]} channels, got "
                f"{x.shape[2]}, {key.shape[2]} and {value.shape[2]}"
            )
        if key.shape[:2] != value.shape[:2] or key.shape[0] != x.shape[0]:
            raise ValueError(
                "query, key and value must agree in batch, key and value in length; got [batch, length] = "
                f"{list(x.shape[:2])}, {list(key.shape[:2])}, {list(value.shape[:2])}"
            )

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _mask_by_head(self, mask: Tensor | None, x: Tensor, key: Tensor) -> Tensor | None:
        """torch's [N·heads, L, S] as [N, heads, L, S]."""
        N, L, S = x.shape[0], x.shape[1], key.shape[1]
        if mask is None or mask.shape == (L, S):
            return mask
        if mask.shape != (N * self.num_heads, L, S):
            raise ValueError(
                f"attn_mask must be [queries, keys] = {[L, S]} or [batch·heads, queries, keys] = "
                f"{[N * self.num_heads, L, S]}, got {list(mask.shape)}"
            )
        return mask.unflatten(0, (N, self.num_heads))

    def _nested(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """torch's encoder may hand over a nested tensor instead of a padded one and a mask."""
        if not (key.is_nested and value.is_nested):
            raise ValueError("query, key and value must all be nested tensors, or none of them")
        x, of_query = self._padded(query)
        of_key, hidden = (x, of_query) if key is query else self._padded(key)
        of_value = of_key if value is key else self._padded(value)[0]
        output, _ = self(
            x, of_key, of_value, key_padding_mask=hidden, query_padding_mask=of_query, need_weights=False,
            is_causal=is_causal,
        )  # fmt: skip
        output = output if self.batch_first else output.transpose(0, 1)
        lengths = (~of_query).sum(1).tolist()
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(output, lengths, strict=True)])

    def _padded(self, nested: Tensor) -> tuple[Tensor, Tensor]:
        """A nested tensor with zeros for padding, and its padding mask."""
        x = torch.nested.to_padded_tensor(nested, 0.0)
        lengths = torch.tensor([part.shape[0] for part in nested.unbind()], device=x.device)
        hidden = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        return x if self.batch_first else x.transpose(0, 1), hidden
