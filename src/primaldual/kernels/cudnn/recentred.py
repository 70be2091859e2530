"""Re-centred softmax heads over all tokens, on cuDNN's kernels: each way two passes over memory more than softmax.

Forward: the keys' sum, and its multiple taken off the queries. Backward, the same with dq and dk: what the mean's
gradient adds is the same for every key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivatives import differentiated_once
from ..launching import in_rows
from ..ragged.passes import Shift, dot_sums, place, sum_rows
from . import attention as cudnn


class RecentredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, factor: float, dropout_p: float
    ) -> Tensor:
        q, k, v = in_rows(q), in_rows(k), in_rows(v)
        factor /= k.shape[2]
        sums, own = sum_rows(k), torch.empty_like(q)
        place(q, own, shift=Shift(sums, factor, beta))
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(own, k, v, None, True, dropout_p, False, False)
        ctx.save_for_backward(own, k, v, found[0], found[1], found[6], found[7], beta, sums)
        ctx.settings = factor, dropout_p, found[2:6]
        return found[0]

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *random, beta, sums = ctx.saved_tensors
        factor, dropout_p, plain = ctx.settings
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            cudnn.like_output(grad, out), q, k, v, out, *random, None, *plain, dropout_p, False
        )
        of_queries = sum_rows(dq)
        place(dk, dk, shift=Shift(of_queries, factor, beta))
        dbeta = None if beta is None else dot_sums(of_queries, sums, -factor, beta.dtype)
        return dq, dk, dv, dbeta, None, None
