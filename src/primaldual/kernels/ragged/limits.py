"""Which heads the ragged kernels take."""

from __future__ import annotations

import torch

from ..launching import refusal_of_device, refusal_of_dtype

MAX_HEAD_DIM = 128
"""Of keys and of values: wider rows do not fit the registers of a program."""


def refusal(dtype: torch.dtype, device: torch.device, head_dim: int, value_dim: int) -> str | None:
    """Why the kernels do not take queries and values like these; None where they do."""
    if reason := refusal_of_dtype(dtype):
        return reason
    widest = max(head_dim, value_dim)
    if widest > MAX_HEAD_DIM:
        return f"takes head dimensions up to {MAX_HEAD_DIM}, not {widest}"
    if device.type == "cuda" and (head_dim % 8 or value_dim % 8):
        return f"takes multiples of 8, not head dimensions {head_dim}, {value_dim}"
    return refusal_of_device(device)
