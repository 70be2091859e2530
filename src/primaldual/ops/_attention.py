"""The public functions: `attention`, and `plan` for what it would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..primal import Primal, as_primal
from . import checks, ragged
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
) -> Tensor | tuple[Tensor, Tensor]:
    """The attention that is dual to `primal`: out_i = Σ_{j∈S} κ(Tq_i, Tk_j) v_j / h(Tq_i).

    Boolean masks hide where True. A float mask is added to log κ, and hides where it is −inf. A query that sees no
    key gets zeros. `bias` of the primal is the layer's to add.

    Args:
        q: queries [batch, heads, length, head_dim].
        k: keys [batch, heads, keys, head_dim]; their number may differ from that of the queries.
        v: values [batch, heads, keys, value_dim].
        primal: the primal layer, or a mechanism's name.
        key_padding_mask: [batch, keys].
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
        parameters: what is learned, by name (`primal.learned(heads, head_dim)`), and what a layer makes of its input
            for every token (`primal.made(heads, value_dim)`); absent ones have their initial value.
        impl: "auto", or the executor to use, as `primaldual.ops.EXECUTORS` lists them. One that cannot raises.
        need_weights: also return [batch, heads, length, keys]; a pooled key's weight is shared by its tokens.
        query_offset: the place of the first query in the sequence of keys. Queries that are the last of a longer
            sequence, such as one step of decoding beside a cache, have keys − length.
        scale: the factor on the scores q·k, 1/√head_dim unless given.

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
        query_offset=query_offset, scale=scale,
    )  # fmt: skip
    chosen, problem = bind(problem, impl)
    plain = problem.q is q and problem.k is k and not (problem.parameters or problem.primal.made(1, 1))
    if key is not None and q.shape[2] and plain and problem.gate is None:
        if len(_known) >= 1024:
            _known.clear()
        _known[key] = _again(problem, chosen)
    output, weights = run(problem, chosen)
    return output if weights is None else (output, weights[..., : k.shape[2]])


_known: dict[tuple[object, ...], Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
"""What was checked and planned before: the same kind of call goes straight to its executor."""


def _again(p: Problem, impl: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same problem, with the same expansion, on other tensors."""
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
) -> Plan:
    """What `attention` would do with the same arguments: the executor, why, and why not the others."""
    problem = state(
        q, k, v, as_primal(primal),
        key_padding_mask=key_padding_mask, query_padding_mask=query_padding_mask, attn_mask=attn_mask,
        is_causal=is_causal, dropout_p=dropout_p, parameters=parameters, need_weights=need_weights,
        query_offset=query_offset, scale=scale,
    )  # fmt: skip
    return choose(problem, impl)
