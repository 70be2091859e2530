"""Which heads the ragged kernels take."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..launching import refusal_of_device, refusal_of_dtype

MAX_HEAD_DIM = 128
"""Of keys and of values: wider rows do not fit the registers of a program."""

BLOCK = 16
"""Queries of the smallest block: a block begins with a window where windows divide it."""


def takes_running_means(windows: Iterable[int], queries: int, tokens: int) -> bool:
    """Whether causal heads can be given tokens, whose windows are complete or running: in a block of queries each
    finds its own window."""
    return queries <= tokens and all(BLOCK % window == 0 for window in windows)


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
