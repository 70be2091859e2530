# mypy: disable-error-code="import-not-found, import-untyped"
"""Linear attention as one operator on a GPU: differentiable, compilable, capturable. The formulas: `linear_kernels`.

What moves through memory, in tensors of [B, H, N, D]: forward 4 (k and v, then q and the output), backward 7; causal,
where keys and values are needed twice, 6 and 11, and 4 forward where the heads alone fill the GPU, so that each is one
segment. Beside them F·(C + 1) float32 numbers for each head and span of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..derivatives import differentiated_once
from ..launching import MULTIPROCESSORS, block_of, empty_like_heads, launch_kernel, precision_asked
from . import causal_kernels, kernels

PROGRAMS = 4 * MULTIPROCESSORS
"""Programs over all heads and spans of rows, where the sequence is long enough: four to each multiprocessor."""
TILE = 128
"""The rows of a program are a multiple of this, and this is one of the rows that any kernel takes at once."""


class Tile(NamedTuple):
    """Rows that a program takes at once (causal: the chunk), its warps, and how many loads are in flight."""

    rows: int
    warps: int
    stages: int


def tile_of(kernel: str, dtype: torch.dtype, widest: int) -> Tile:
    """How a kernel is launched, by the element type and the widest of D, D_φ and D_v: what spills few registers.

    float32 products are scalar instructions that hold their operands in registers: small tiles. Wide heads take twice
    the warps, for a state that is twice as large on each side, and the gradients, which hold two, half the rows.
    """
    if dtype == torch.float32:
        return Tile(32, 4, 2) if widest <= 32 else Tile(16, 8, 1)
    if widest <= 64:
        return Tile(64, 4, 3 if kernel in ("sum_keys", "attend_queries") else 2)
    return Tile(32 if "query_gradients" in kernel or kernel == "causal_key_gradients" else 64, 8, 2)


@torch.library.custom_op("primaldual::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    omega: Tensor | None,
    weight: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """out_i = Φ(q_i)ᵀ Σ_j w_j Φ(k_j) v_jᵀ / Φ(q_i)ᵀ Σ_j w_j Φ(k_j), zero where no key is seen; and the states.

    Args:
        q: [B, H, L, D]
        k: [B, H, S, D]; S ≤ L where it is causal
        v: [B, H, S, C]
        shift: float32 [B, H, D], contiguous; queries and keys are mapped to (x − shift) ⊙ scale
        scale: float32 [B, H, D], contiguous, given with shift
        omega: [F, D] like q, contiguous: Ω/D^(1/4) of random features; None for elu + 1
        weight: float32 [B or 1, H or 1, S], factors on Φ(k_j); zero hides the key
        is_causal: whether query i sees keys up to i alone

    Returns:
        [B, H, L, C], laid out as q is, and what the gradients need: the state [B, H, F·C + F]; causal one for every
        segment of the sequence, the sum over the segments before it.
    """
    out, state = _outputs(q, v, omega, is_causal)
    if out.numel() == 0:
        return out, state.zero_()
    (B, H, L, _), S = q.shape, k.shape[2]
    w = None if weight is None else weight.expand(B, H, S)
    span = _span(q, L if is_causal else S)
    spans = _count(L if is_causal else S, span)
    partial = state.new_empty(B, H, spans, state.shape[-1])
    with torch.cuda.device_of(q):
        if not is_causal or spans > 1:
            _launch(
                kernels.sum_keys, (B * H, spans, 1), (k, v, w, shift, scale, omega, partial),
                (k.stride(), v.stride(), _strides(w), H, S, span), q, v, omega, S,
            )  # fmt: skip
        if is_causal:
            state = _sum_before(partial) if spans > 1 else state.zero_()
            _launch(
                causal_kernels.attend_causal, (B * H, spans, 1), (q, k, v, w, shift, scale, omega, state, out),
                (q.stride(), k.stride(), v.stride(), _strides(w), out.stride(), H, L, S, span), q, v, omega, L, S,
            )  # fmt: skip
        else:
            state, span = partial.sum(2), _span(q, L)
            _launch(
                kernels.attend_queries, (B * H, _count(L, span), 1), (q, shift, scale, omega, state, out),
                (q.stride(), out.stride(), H, L, span), q, v, omega, L,
            )  # fmt: skip
    return out, state


@torch.library.custom_op("primaldual::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    omega: Tensor | None,
    weight: Tensor | None,
    state: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, shift, scale and weight; empty for what is None."""
    gradients = _gradients(q, k, v, shift, weight)
    if grad.numel() == 0:
        for x in gradients:
            x.zero_()
        return gradients
    grad_q, grad_k, grad_v, grad_shift, grad_scale, grad_weight = gradients
    (B, H, L, D), S = q.shape, k.shape[2]
    w = None if weight is None else weight.expand(B, H, S)
    grad_w = None if weight is None else state.new_empty(B, H, S)
    span = _span(q, L)
    key_span = span if is_causal else _span(q, S)
    spans, key_spans = _count(L, span), _count(L if is_causal else S, key_span)
    partial = state.new_empty(B, H, spans, state.shape[-1])
    moments = None if shift is None else state.new_empty(B, H, spans, 2, D)
    key_moments = None if shift is None else state.new_empty(B, H, key_spans, 2, D)
    with torch.cuda.device_of(q):
        if is_causal:
            normalizer, deltas = state.new_empty(2, B, H, L)
            _launch(
                causal_kernels.causal_query_gradients, (B * H, spans, 1),
                (q, k, v, grad, w, shift, scale, omega, state, grad_q, partial, moments, normalizer, deltas),
                (q.stride(), k.stride(), v.stride(), grad.stride(), _strides(w), grad_q.stride(), H, L, S, span),
                q, v, omega, L, S,
            )  # fmt: skip
            after = _sum_before(partial, reverse=True)
            _launch(
                causal_kernels.causal_key_gradients, (B * H, spans, 1),
                (q, k, v, grad, w, shift, scale, omega, after, normalizer, deltas, grad_k, grad_v, grad_w, key_moments),
                (q.stride(), k.stride(), v.stride(), grad.stride(), _strides(w), grad_k.stride(), grad_v.stride(),
                 H, L, S, span), q, v, omega, L, S,
            )  # fmt: skip
        else:
            _launch(
                kernels.query_gradients, (B * H, spans, 1),
                (q, grad, shift, scale, omega, state, grad_q, partial, moments),
                (q.stride(), grad.stride(), grad_q.stride(), H, L, span), q, v, omega, L,
            )  # fmt: skip
            _launch(
                kernels.key_gradients, (B * H, key_spans, 1),
                (k, v, w, shift, scale, omega, state, partial.sum(2), grad_k, grad_v, grad_w, key_moments),
                (k.stride(), v.stride(), _strides(w), grad_k.stride(), grad_v.stride(), H, S, key_span),
                q, v, omega, S,
            )  # fmt: skip
    if moments is not None and key_moments is not None and scale is not None:
        first, second = (moments.sum(2) + key_moments.sum(2)).unbind(2)
        grad_shift, grad_scale = -scale * first, second.contiguous()
    if weight is not None and grad_w is not None:
        grad_weight = grad_w.sum_to_size(weight.shape)
    return grad_q, grad_k, grad_v, grad_shift, grad_scale, grad_weight


@linear_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, shift: Any, scale: Any, omega: Tensor | None, weight: Any, is_causal: bool
) -> tuple[Tensor, Tensor]:
    return _outputs(q, v, omega, is_causal)


@linear_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None, scale: Any, omega: Any, weight: Tensor | None,
    state: Tensor, is_causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _gradients(q, k, v, shift, weight)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, state = ctx.saved_tensors
    grads = linear_attention_backward(grad, *tensors, state, ctx.is_causal)
    given = [*tensors[:5], None, tensors[6]]  # no gradient for omega
    return *(None if x is None else g for x, g in zip(given, [*grads[:5], None, grads[5]], strict=True)), None


linear_attention.register_autograd(differentiated_once(_backward), setup_context=_save)


@register_flop_formula(torch.ops.primaldual.linear_attention)
def _flops(q: Any, k: Any, v: Any, shift: Any, scale: Any, omega: Any, weight: Any, is_causal: bool, **_: Any) -> int:
    """2FC for each key and each query, causal once more for the key; 2DF more for each with random features."""
    (B, H, L, D), S, C = q, k[2], v[3]
    F = D if omega is None else omega[0]
    chunk = tile_of("attend_causal", torch.bfloat16, max(D, F, C)).rows
    keys = S + (L if is_causal else 0)
    return 2 * B * H * ((L + keys) * (F * C + (0 if omega is None else D * F)) + is_causal * L * chunk * (F + C))


@register_flop_formula(torch.ops.primaldual.linear_attention_backward)
def _backward_flops(
    grad: Any, q: Any, k: Any, v: Any, shift: Any, scale: Any, omega: Any, weight: Any, state: Any, is_causal: bool,
    **_: Any,
) -> int:  # fmt: skip
    """4FC for each key and each query, causal half as much again; 4DF more for each with random features."""
    (B, H, L, D), S, C = q, k[2], v[3]
    F = D if omega is None else omega[0]
    chunk = tile_of("causal_key_gradients", torch.bfloat16, max(D, F, C)).rows
    dense = (L + S) * (2 * F * C + (0 if omega is None else 2 * D * F))
    return 2 * B * H * (dense + is_causal * L * (2 * F * C + chunk * (4 * F + 3 * C)))


def _outputs(q: Tensor, v: Tensor, omega: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs of `linear_attention`."""
    F, C = q.shape[3] if omega is None else omega.shape[0], v.shape[3]
    segments = (_count(q.shape[2], _span(q, q.shape[2])),) if is_causal else ()
    return empty_like_heads(q, C), q.new_empty(*q.shape[:2], *segments, F * C + F, dtype=torch.float32)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of `linear_attention_backward`."""
    grad_q, grad_k, grad_v = (empty_like_heads(x, x.shape[3]) for x in (q, k, v))
    grad_shift, grad_scale, grad_weight = (
        q.new_empty((0,) if x is None else x.shape, dtype=torch.float32) for x in (shift, shift, weight)
    )
    return grad_q, grad_k, grad_v, grad_shift, grad_scale, grad_weight


def _launch(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[object, ...],
    q: Tensor, v: Tensor, omega: Tensor | None, *lengths: int,
) -> None:  # fmt: skip
    """Launch a kernel for heads like these, in sequences of these lengths."""
    D, C = q.shape[3], v.shape[3]
    F = D if omega is None else omega.shape[0]
    rows, warps, stages = tile_of(kernel.__name__, q.dtype, max(D, F, C))
    even = len({*lengths}) == 1 and lengths[0] % rows == 0
    blocks = rows, block_of(D), block_of(F), block_of(C)
    compiled_for = even, D, F, C, *blocks, omega is not None, precision_asked(), stages
    launch_kernel(kernel, grid, tensors, (*numbers, *compiled_for), warps)


def _span(q: Tensor, rows: int) -> int:
    """Rows of one program: multiples of the tile, for up to PROGRAMS programs over all heads."""
    splits = max(1, PROGRAMS // max(1, q.shape[0] * q.shape[1]))
    return max(1, -(-rows // (splits * TILE))) * TILE


def _count(rows: int, span: int) -> int:
    """Programs to a head."""
    return max(1, -(-rows // span))


def _strides(weight: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if weight is None else weight.stride()


def _sum_before(states: Tensor, reverse: bool = False) -> Tensor:
    """For each segment of dimension 2, the sum of those before it; reversed, of those after it."""
    B, H, segments, size = states.shape
    sums = torch.empty_like(states)
    grid = B * H, -(-size // 256), 1
    launch_kernel(causal_kernels.sum_before, grid, (states, sums), (segments, size, 256, reverse))
    return sums
