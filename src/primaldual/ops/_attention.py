"""The public functions: `attention`, and `plan` for what it would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..primal import Primal, as_primal
from . import checks, ragged, shared_keys
from .plan import EXECUTORS, Plan, bind, choose, mode_of, run
from .problem import Problem, state


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    primal: Primal | str,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    parameters: Mapping[str, Tensor] | None = None,
    impl: str = "auto",
    need_weights: bool = False,
    query_offset: int = 0,
    scale: float | None = None,
    left_padding: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The attention that is dual to `primal`: out_i = Σ_{j∈S} κ(Tq_i, Tk_j) v_j / h(Tq_i).

    Boolean masks hide where True. A float mask is added to log κ, and hides where it is −inf. A query that sees no
    key gets zeros. `bias` of the primal is the layer's to add.

    Args:
        q: queries [batch, heads, length, head_dim].
        k: keys [batch, kv_heads, keys, head_dim]; their number may differ from that of the queries. So many key/value
            heads divide the heads: each is shared by a group of query heads, which stand side by side, are fitted to
            one training set, and so have one scale. Scales are given for the key/value heads, or for the query heads.
        v: values [batch, kv_heads, keys, value_dim].
        primal: the primal layer, or a mechanism's name.
        key_padding_mask: [batch, keys]. A row's sequence begins with the first token that it leaves: windows, prefixes,
            patterns and token maps of one's own count from there, so that a sequence alone and in a left-padded batch
            give the same. What is hidden further inside moves nothing, and nor do patches of a grid. A query before
            the first token of its row sees no key of a pattern.
        query_padding_mask: [batch, length]; matters to convolutions alone.
        attn_mask: [length, keys] or [batch or 1, heads or 1, length, keys]. What it hides from a query, by
            True or −inf, takes no part in that query's statistics either; a key with −10⁹ on its score does. Heads
            pooled by more than 1 refuse it, and maps that mix tokens refuse one that hides tokens, −10⁴ and less
            included, which would be seen through others (causal maps take one of the future).
        is_causal: query i sees keys up to token query_offset + i: without an offset the first query sees the first
            key alone, also where there are fewer queries than keys (torch's rule). An attn_mask beside it applies too.
            One that says no more is torch's hint, and costs nothing where its values can be looked at (once for a
            tensor, until it changes): pooled heads take the hint and refuse any other. In a compiled function or a
            CUDA graph, whose values come later, both are applied, and what pooled heads and maps refuse is an
            assertion that runs with it.
        dropout_p: on the weights; for finite features, which have none, on the output.
        parameters: what is learned, by name (`primal.learned(heads, head_dim, kv_heads)`), and what a layer makes of
            its input for every token (`primal.made(heads, value_dim, kv_heads)`); absent ones have their initial value.
            Training sets, weights of points and maps of tokens have them for the key/value heads, all else for the
            query heads.
        impl: "auto", or the executor to use, as `primaldual.ops.EXECUTORS` lists them. One that cannot raises.
        need_weights: also return [batch, heads, length, keys]; a pooled key's weight is shared by its tokens.
        query_offset: the place of the first query in the sequence of keys. Queries that are the last of a longer
            sequence, such as one step of decoding beside a cache, have keys − length.
        scale: the factor on the scores q·k, 1/√head_dim unless given.
        left_padding: whether a row begins with the first token that `key_padding_mask` leaves. Where False, all rows
            begin with token 0, hidden or not, as the pixels of a picture stand where they stand; where no row's first
            token is hidden that is the same, and spares a GPU what it would do to find out.

    Returns:
        The output [batch, heads, length, value_dim], or (output, weights).

    >>> import torch
    >>> q = k = v = torch.randn(1, 8, 100, 16)
    >>> attention(q, k, v, "bn+sh").shape
    torch.Size([1, 8, 100, 16])
    """
    primal = as_primal(primal)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        checks.inputs(q=q, k=k, v=v)
    key = None
    if (
        key_padding_mask is None and query_padding_mask is None and attn_mask is None
        and not (parameters or need_weights or torch.compiler.is_compiling())
    ):  # fmt: skip
        key = (primal, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, is_causal,
               dropout_p, impl, query_offset, scale, *mode_of(q))  # fmt: skip
        if (known := _known.get(key)) is not None:
            return known(q, k, v)
    problem = state(
        q, k, v, primal,
        key_padding_mask=key_padding_mask, query_padding_mask=query_padding_mask, attn_mask=attn_mask,
        is_causal=is_causal, dropout_p=dropout_p, parameters=parameters, need_weights=need_weights,
        query_offset=query_offset, scale=scale, left_padding=left_padding,
    )  # fmt: skip
    chosen, problem = bind(problem, impl)
    if key is not None and q.shape[2] and k.shape[2] and _plain(problem):
        if len(_known) >= 1024:
            _known.clear()
        _known[key] = _again(problem, chosen, k.shape[1])
    output, weights = run(problem, chosen)
    return output if weights is None else (output, weights[..., : k.shape[2]])


def _plain(p: Problem) -> bool:
    """Whether a problem is all in its tensors, the expansion and a few numbers."""
    return p.gate is None and not (p.primal.token_maps or p.parameters or p.primal.made(1, 1))


_known: dict[tuple[object, ...], Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
"""What was checked and planned before: the same kind of call goes straight to its executor."""


def _again(p: Problem, impl: str, kv_heads: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same problem, with the same expansion, on other tensors."""
    whole, group, each = _once_more(p, impl), p.group, p.q.shape[1] // kv_heads  # what is kept holds no tensor of p
    if group > 1:
        return lambda q, k, v: shared_keys.unfold(whole(shared_keys.fold(q, kv_heads), k, v), group)
    if each > 1:
        return lambda q, k, v: whole(q, shared_keys.repeat(k, each), shared_keys.repeat(v, each))
    return whole


def _once_more(p: Problem, impl: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if impl == "ragged" and (direct := ragged.direct(p)) is not None:
        return direct
    expansion, is_causal, dropout_p, compute = p.expansion, p.is_causal, p.dropout_p, EXECUTORS[impl].run
    offset, scale = p.query_offset, p.score_scale

    def known(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compute(Problem(
            expansion, q, k, v, is_causal=is_causal, dropout_p=dropout_p, query_offset=offset, score_scale=scale
        ))[0]  # fmt: skip

    return known


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    primal: Primal | str,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    parameters: Mapping[str, Tensor] | None = None,
    impl: str = "auto",
    need_weights: bool = False,
    query_offset: int = 0,
    scale: float | None = None,
    left_padding: bool = True,
) -> Plan:
    """What `attention` would do with the same arguments: the executor, why, and why not the others."""
    problem = state(
        q, k, v, as_primal(primal),
        key_padding_mask=key_padding_mask, query_padding_mask=query_padding_mask, attn_mask=attn_mask,
        is_causal=is_causal, dropout_p=dropout_p, parameters=parameters, need_weights=need_weights,
        query_offset=query_offset, scale=scale, left_padding=left_padding,
    )  # fmt: skip
    return choose(problem, impl)
