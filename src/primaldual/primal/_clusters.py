"""k-means with a deterministic start, batched and free of data-dependent shapes."""

from __future__ import annotations

import torch
from torch import Tensor


def cluster(keys: Tensor, seen: Tensor, prefix: int, scale: int, steps: int) -> Tensor:
    """Which key belongs to which cluster, as a boolean [B, H, 1, clusters, S].

    Row b has ⌈valid_b/scale⌉ clusters; further ones, up to the most a row can have, are empty. The start is every
    scale-th valid key, so it depends on nothing but the keys. The first `prefix` tokens are clusters of their own.
    No gradient flows through the assignment.
    """
    tokens = keys.shape[-2]
    index = torch.arange(tokens, device=keys.device)
    seen = seen[:, :, 0].expand(keys.shape[0], keys.shape[1], -1)  # [B, H, S]
    valid = seen & (index >= prefix)
    points = keys.detach().to(torch.promote_types(keys.dtype, torch.float32))
    rank = valid.cumsum(-1) - 1
    clusters = torch.arange(max(0, -(-(tokens - prefix) // scale)), device=keys.device)
    member = (rank.unsqueeze(-2) == clusters[:, None] * scale) & valid.unsqueeze(-2)  # [B, H, K, S]: the start
    exists = member.any(-1)  # [B, H, K]
    centres = torch.zeros_like(points[..., : clusters.numel(), :])
    for _ in range(steps if clusters.numel() else 0):
        count = member.sum(-1, keepdim=True)
        # a cluster that lost all its keys keeps its centre
        centres = torch.where(count > 0, member.to(points.dtype) @ points / count.clamp(min=1), centres)
        distance = centres.square().sum(-1, keepdim=True) - 2 * centres @ points.transpose(-1, -2)  # less |k|²
        nearest = distance.masked_fill(~exists.unsqueeze(-1), torch.inf).argmin(-2)  # [B, H, S]
        member = (nearest.unsqueeze(-2) == clusters[:, None]) & valid.unsqueeze(-2)
    alone = (torch.arange(min(prefix, tokens), device=keys.device)[:, None] == index) & seen.unsqueeze(-2)
    return torch.cat([alone, member], dim=-2).unsqueeze(2)
