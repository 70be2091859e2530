"""Prompts of several lengths as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def left_padded(prompts: Sequence[Tensor | Sequence[int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens [prompts, longest], and what of them is padding, True at the left of what is shorter.

    >>> left_padded([[5, 6, 7], [8]])
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([[False, False, False],
            [ True,  True, False]]))
    """
    rows = [torch.as_tensor(prompt, dtype=torch.int64, device=device) for prompt in prompts]
    if not rows or any(row.dim() != 1 or not len(row) for row in rows):
        raise ValueError(f"prompts must be sequences of at least one token each, got {[list(r.shape) for r in rows]}")
    longest = max(len(row) for row in rows)
    tokens = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(longest, device=device) < longest - lengths[:, None]


def checked(tokens: Tensor, padding: Tensor | None, vocabulary: int) -> tuple[Tensor, Tensor | None]:
    """[batch, length] of a model's tokens, each row with one at least; padding that hides nothing is None."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel() or tokens.dtype != torch.int64:
        said = f"{tokens.dtype}, {list(tokens.shape)}" if isinstance(tokens, Tensor) else repr(tokens)[:80]
        raise ValueError(
            f"tokens must be int64, [batch, length] with a length of at least 1 (left_padded makes them of lists); "
            f"got {said}"
        )
    if padding is not None and (padding.shape != tokens.shape or padding.dtype != torch.bool):
        raise ValueError(
            f"padding must be boolean, True at padding, of the shape of tokens {list(tokens.shape)}; got "
            f"{padding.dtype}, {list(padding.shape)}"
        )
    if padding is not None and bool(padding.all(1).any()):
        raise ValueError("a row of tokens is padding alone; every row needs one token to begin with")
    shown = tokens if padding is None else tokens[~padding]
    if int(shown.min()) < 0 or int(shown.max()) >= vocabulary:
        raise ValueError(
            f"tokens must be 0 … {vocabulary - 1}, those of the model; got {int(shown.min())} … {int(shown.max())}"
        )
    if padding is not None:
        tokens = tokens.masked_fill(padding, 0)
        padding = padding if bool(padding.any()) else None
    return tokens, padding
