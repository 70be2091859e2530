"""cuDNN's attention through torch: when it can be taken, and what must be done to get right gradients from it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launching import traced, without_triton
from ..native.notes import Fused, FusedBack, notes
from ..ragged.passes import place

STRIDED = torch.__version__.startswith("2.11.")
"""Whether cuDNN is given log-sum-exps as they lie: seen to be right with this torch, and others get copies."""


def wrong_gradients(keys: int) -> bool:
    """Whether cuDNN gives NaN for the gradients of queries whose scores are all below −88.

    It takes 128 keys at a time, and hides what is beyond the last one unless this many are exactly half a block: there
    the weights of keys that do not exist, e^(0 − lse), overflow.
    """
    return keys % 128 == 64


SMALL_HEAD = 16
"""Heads no wider than this are computed in less time than cuDNN draws the random numbers of their dropout."""


def left_to_others(q: Tensor, k: Tensor, v: Tensor, masked: bool, dropout_p: float) -> bool:
    """Whether torch must not give cuDNN these tensors: its gradients would be wrong, or slower than those of others."""
    if not (q.is_cuda and q.dtype.itemsize == 2 and torch.is_grad_enabled()):
        return False
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return wrong_gradients(k.shape[2]) or (dropout_p > 0 and not masked and q.shape[-1] <= SMALL_HEAD)


def usable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN's attention takes these tensors, and nothing looks at the operators."""
    if not q.is_cuda or traced() or without_triton():
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.numel() or not k.numel():
        return False
    if max(q.shape[-1], v.shape[-1]) > 128 or q.shape[-1] % 8 or v.shape[-1] % 8:
        return False
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def refusal(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> str | None:
    """Why these tensors are left to others; None where they are not."""
    if dropout_p and q.shape[-1] <= SMALL_HEAD:
        return "cuDNN's random numbers cost more than the attention of heads as small as these"
    if wrong_gradients(k.shape[2]):
        return f"cuDNN's gradients are not to be trusted with {k.shape[2]} keys"
    return None if usable(q, k, v) else "cuDNN's attention does not take these tensors"


def fused(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Softmax attention by cuDNN: outputs, which lie as the queries do, and log-sum-exps [B, H, L, 1]."""
    if (steps := notes()) is None:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False)
        return found[0], found[1]
    _check_noted(is_causal)
    out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)
    steps.append(Fused(q, k, v, out, lse))
    return out, lse


def fused_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values. The output's must lie as the output does."""
    if (steps := notes()) is None:
        seed = torch.empty(1, dtype=torch.int64, device=q.device)  # of no dropout
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, is_causal
        )
    _check_noted(is_causal)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    steps.append(FusedBack(grad, q, k, v, out, lse, dq, dk, dv))
    return dq, dk, dv


def _check_noted(is_causal: bool) -> None:
    if is_causal:
        raise NotImplementedError("the compiled part has no causal call of cuDNN's attention")


def by_cudnn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the queries, keys and values of one group, from our outputs and log-sum-exps [B, H, L].

    The queries are rounded after a shift as they were forward, or else large scores do not find their log-sum-exp.
    Heads are given for the batch and the batch for heads: so no other attention of torch's has the same strides.
    """
    as_it_lies = STRIDED and lse.data_ptr() % 16 == 0
    grad, q, k, v, out, lse = (x.transpose(0, 1) for x in (grad, q, k, v, out, lse))
    lse = (lse if as_it_lies else lse.contiguous()).unsqueeze(3)
    q = _told_apart(grad, q, k, v, out, lse, is_causal)
    dq, dk, dv = fused_back(grad, q, k, v, out, lse, is_causal)
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def _told_apart(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> Tensor:  # fmt: skip
    """The queries; or a copy, where cuDNN cannot read 16 bytes at a time or would run them by another call's plan.

    torch keeps cuDNN's plan of a backward pass by the shapes and strides of q, k and v, although the plan holds the
    strides of the others too, and may count on how all are aligned. A call that differs in these alone gets queries
    with some room at the end of their rows, as much as tells it apart.
    """
    others = tuple((x.stride(), x.data_ptr() % 16 == 0) for x in (grad, k, v, out, lse))

    def fits(strides: tuple[int, ...]) -> bool:
        key = q.device, q.dtype, q.shape, strides, k.shape, k.stride(), v.shape, v.stride(), is_causal
        return _plans.setdefault(key, others) == others

    readable = q.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in q.stride()[:3])
    if readable and fits(q.stride()):
        return q
    H, B, L, D = q.shape
    row = H * D + 16
    while not fits((D, L * row, row, 1)):
        row += 16
    own = q.new_empty(B * L * row).as_strided(q.shape, (D, L * row, row, 1))
    place(q, own)
    return own


_plans: dict[tuple[object, ...], tuple[object, ...]] = {}
"""What cuDNN's plan for queries, keys and values that lie in this way was first made with.

Kept for good, as torch's plans are: one that is forgotten here could be run there with strides that are not its own."""


def like_output(grad: Tensor, out: Tensor) -> Tensor:
    """The gradient with the strides of the output: see `_told_apart`."""
    return grad if grad.stride() == out.stride() else torch.empty_like(out).copy_(grad)
