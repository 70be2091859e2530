"""Dense formulas in the place of kernels, which note what they are called with: kernels' callers, on any CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from primaldual.kernels.cudnn import attention as cudnn
from primaldual.kernels.cudnn import beside
from primaldual.kernels.cudnn.recentred import RecentredAttention
from primaldual.kernels.native import layers as compiled
from primaldual.kernels.projection import turned as projection
from primaldual.kernels.projection.grouped import Groups
from primaldual.kernels.ragged import limits
from primaldual.kernels.ragged.layout import HeadLayout
from primaldual.ops import ragged, rotary
from primaldual.ops.layer import scaled
from primaldual.primal import Rotary


class Called(NamedTuple):
    """A kernel that was called: whether it re-centres queries, and whether it pools the inputs of a layer."""

    kernel: str
    recentres: bool
    pools_inputs: bool = False


def attend(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: Sequence[int]) -> Tensor:
    """Softmax heads over the means of windows, q − βμ in the place of q; windows divide the keys."""
    outputs = []
    for head, scale in enumerate(scales):
        keys, values = (x[:, head].unflatten(1, (-1, scale)).mean(2) for x in (k, v))
        queries = q[:, head] if beta is None else q[:, head] - beta[head] * keys.mean(1, keepdim=True)
        outputs.append((queries @ keys.mT * q.shape[-1] ** -0.5).softmax(-1) @ values)
    return torch.stack(outputs, 1)


def in_place_of_kernels(patch: pytest.MonkeyPatch) -> list[Called]:
    """From here on kernels are these formulas, and nothing says that a CPU cannot run them."""
    called: list[Called] = []

    def of(heads: int, factor: float, beta: Tensor | None) -> Tensor:
        return factor * (torch.ones(heads) if beta is None else beta)

    def tokens(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: tuple[int, ...], *rest: object) -> Tensor:
        called.append(Called("ragged tokens", beta is not None))
        return attend(q, k, v, beta, scales)

    def points(
        q: Tensor, keys: Tensor, values: Tensor, layout: Sequence[HeadLayout], dim: int, **rest: object
    ) -> tuple[Tensor, None]:
        called.append(Called("ragged points", False))
        out = torch.empty(*q.shape[:3], dim, dtype=q.dtype)
        for at in layout:
            size = q.shape[0], at.points
            k = keys.as_strided((*size, q.shape[3]), (at.k_batch, at.k_row, 1), at.k_offset)
            v = values.as_strided((*size, dim), (at.v_batch, at.v_row, 1), at.v_offset)
            out[:, at.head] = attend(q[:, at.head, None], k[:, None], v[:, None], None, (1,))[:, 0]
        return out, None

    def mixed(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, factor: float, scales: tuple[int, ...]) -> Tensor:
        called.append(Called("mixed", factor != 0))
        return attend(q, k, v, of(len(scales), factor, beta), scales)

    def recentred(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, factor: float, dropout_p: float) -> Tensor:
        called.append(Called("recentred", True))
        return attend(q, k, v, of(q.shape[1], factor, beta), (1,) * q.shape[1])

    def layer(
        x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, recentres: bool, factor: float,
        beta: Tensor | None, *rest: object, pool_first: bool,
    ) -> Tensor:  # fmt: skip
        called.append(Called("layer", recentres, pool_first))
        heads = (groups.heads, groups.head_dim)
        q, k, v = (
            part.unflatten(-1, heads).transpose(1, 2)
            for part in torch.nn.functional.linear(x, weight, bias).chunk(3, -1)
        )
        return attend(q, k, v, of(groups.heads, factor, beta) if recentres else None, groups.scales)

    def turned(
        x: Tensor, weight: Tensor, bias: Tensor | None, gate: None, q_table: Tensor, k_table: Tensor, heads: int
    ) -> tuple[Tensor, ...]:
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in torch.nn.functional.linear(x, weight, bias).chunk(3, -1)
        )

        def turn(one: Tensor, table: Tensor) -> Tensor:
            (a, b), (cos, sin) = one.chunk(2, -1), table.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return turn(q, q_table), turn(k, k_table), v

    def table(map_: Rotary, head_dim: int, places: rotary.Places, device: torch.device) -> Tensor:
        return torch.cat(map_.turns(places.on(device), head_dim), -1).unsqueeze(0)

    patch.setattr(rotary, "refusal", lambda *given: None)
    patch.setattr(rotary, "table", table)
    patch.setattr(projection, "project", turned)
    patch.setattr(limits, "refusal", lambda *given: None)
    patch.setattr(cudnn, "refusal", lambda *given: None)
    patch.setattr(cudnn, "usable", lambda *given: True)
    patch.setattr(beside, "long", lambda *given: True)
    patch.setattr(ragged, "attend_tokens", tokens)
    patch.setattr(ragged, "attend_points", points)
    patch.setattr(beside.Tokens, "apply", mixed)
    patch.setattr(RecentredAttention, "apply", recentred)
    patch.setattr(compiled, "attend", layer)
    patch.setattr(scaled, "attend_points", lambda p, given, *rest, **by: layer(*given, pool_first=True))
    return called
