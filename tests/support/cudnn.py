"""A stand-in for cuDNN's attention, where there is no GPU."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from primaldual.kernels.cudnn import attention as cudnn
from primaldual.kernels.cudnn import beside as parallel


def stand_in(patch: pytest.MonkeyPatch, points: Collection[int]) -> list[int]:
    """From here on heads over so many points go back through a dense formula; gives the numbers of those that did.

    As in torch, the strides of q, k and v say which plan runs, and a plan is for the strides that it was made with.
    """
    seen: list[int] = []
    plans: dict[tuple[object, ...], tuple[object, ...]] = {}

    def attend(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: None, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Weights are those of the given log-sum-exp, so whatever is wrong with it shows in all gradients."""
        assert grad.stride() == out.stride() and grad.shape == out.shape
        assert lse.shape == (*q.shape[:3], 1) and lse.dtype == torch.float32
        assert lse.is_contiguous() or cudnn.STRIDED
        assert q.data_ptr() % 16 == 0 and min(q.stride()) > 0
        assert q.shape[3] % 8 or not any(stride % 8 for stride in q.stride()[:3])  # the GPU has no other dimensions
        plan, others = tuple((x.shape, x.stride()) for x in (q, k, v)), (grad.stride(), out.stride(), lse.stride())
        assert plans.setdefault(plan, others) == others
        assert (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0.0)
        assert not cudnn.wrong_gradients(max_k)
        seen.append(max_k)
        scale, gradients = q.shape[-1] ** -0.5, [torch.empty_like(x) for x in (q, k, v)]
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
        p = (q @ k.mT * scale - lse).exp()
        p = p.tril() if is_causal else p
        ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        found = ds @ k, ds.mT @ q, p.mT @ grad
        return tuple(there.copy_(x) for x, there in zip(found, gradients, strict=True))

    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: None, compute_lse: bool, dropout_p: float, is_causal: bool, debug: bool
    ) -> tuple[Tensor, Tensor]:
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        out = torch.empty_like(q) if q.shape == v.shape else q.new_empty(*q.shape[:3], v.shape[3])
        return out.copy_(scores.softmax(-1) @ v.float()), scores.logsumexp(-1, keepdim=True)

    patch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", forward)
    patch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", attend)
    patch.setattr(cudnn, "_plans", {})
    patch.setattr(parallel, "long", lambda queries, many, dim: many in points)
    patch.setattr(cudnn, "usable", lambda q, k, v: True)
    return seen
