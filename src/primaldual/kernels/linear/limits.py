"""Which heads the kernels of linear attention take."""

from __future__ import annotations

import torch

from ..launching import refusal_of_device, refusal_of_dtype

MAX_DIM = 128
"""The largest of D, D_φ and D_v, in causal float32 half of it: a state lives in registers."""


def refusal(
    dtype: torch.dtype, device: torch.device, is_causal: bool, head_dim: int, features: int, value_dim: int
) -> str | None:
    """Why the kernels do not take queries, features and values like these; None where they do."""
    if reason := refusal_of_dtype(dtype):
        return reason
    largest = MAX_DIM // 2 if is_causal and dtype == torch.float32 else MAX_DIM
    dims = head_dim, features, value_dim
    if not all(1 <= dim <= largest for dim in dims):
        return f"takes dimensions of heads, features and values from 1 to {largest}, not {dims}"
    if device.type == "cuda" and dtype != torch.float32 and (head_dim % 8 or value_dim % 8):
        # rows of no whole 16 bytes: right in the interpreter, not yet seen right on a GPU
        return f"takes multiples of 8, not head dimensions {head_dim}, {value_dim}"
    return refusal_of_device(device)
