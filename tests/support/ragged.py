"""What the tests of the ragged kernels share: runs, budgets, and the dropout mask that the kernels draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from primaldual import Primal, attention
from primaldual.dual import GroupHeadsByScale
from primaldual.kernels import launching
from primaldual.kernels.kept import Kept
from primaldual.kernels.ragged import work as ragged_work
from primaldual.ops import ragged, reference
from primaldual.ops.problem import Problem
from support.battery import relative_error
from support.rounding import rounded_at_every_step

Shape = tuple[int, int, int, int]
"""Queries, keys, head dimension, value dimension."""


def run(
    primal: Primal,
    shape: Shape,
    impl: str,
    dtype: torch.dtype,
    rounded: torch.dtype | None = None,
    *,
    heads: int,
    batch: int = 1,
    mask: str = "none",
    is_causal: bool = False,
    dropout_p: float = 0.0,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """The output and every gradient, of inputs that are rounded first."""
    L, S, D, C = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(rounded or dtype).to(device, dtype)

    leaves = {"q": draw(batch, heads, L, D), "k": draw(batch, heads, S, D), "v": draw(batch, heads, S, C)}
    up = draw(batch, heads, L, C)
    hide = torch.rand(batch, S, generator=generator) < 0.4
    hide[0, : S if batch > 1 else S // 2] = True  # nothing to see for a batch, or for the first causal queries
    padding = {"none": None, "padding": hide.to(device)}.get(mask)
    if mask in ("bias", "learned bias"):
        padding = draw(batch, S).masked_fill(hide.to(device), -torch.inf)
    sizes = _terms(**leaves, up=up)
    learned = {}
    for name, start in primal.learned(heads, D).items():
        learned[name] = start.to(device, dtype) + 0.3 * draw(*start.shape)
    for name, part in primal.made(heads, C).items():
        tokens = L if part.of == "query" else S
        start = part.start.to(device, dtype)[:, None]
        learned[name] = part.function(start + draw(batch, heads, tokens, *part.start.shape[1:])).to(dtype)
    leaves = {name: x.detach().requires_grad_() for name, x in (leaves | learned).items()}
    if mask == "learned bias":
        assert padding is not None
        leaves["bias"] = padding = padding.requires_grad_()
    out = attention(
        leaves["q"], leaves["k"], leaves["v"], primal,
        key_padding_mask=padding, is_causal=is_causal, dropout_p=dropout_p, impl=impl,
        parameters={name: leaves[name] for name in learned},
    )  # fmt: skip
    assert isinstance(out, Tensor)
    gradients = torch.autograd.grad(out, list(leaves.values()), up)
    return {"out": out.detach(), "terms": sizes} | dict(zip(leaves, gradients, strict=True))


def _terms(q: Tensor, k: Tensor, v: Tensor, up: Tensor) -> Tensor:
    """How large the terms of the gradients of q and k are, (dp_ij − Σ_j p_ij dp_ij) k_j, times the scores in p."""
    if not (q.numel() and k.numel()):
        return torch.zeros(())
    root = q.shape[-1] ** 0.5
    scores, dp = (x @ y.mT for x, y in ((q, k), (up, v)))
    return (1 + scores.abs().max() / root) * dp.abs().max() * torch.maximum(q.abs().max(), k.abs().max()) / root


def assert_close(
    found: dict[str, Tensor], rough: dict[str, Tensor], truth: dict[str, Tensor], eps: float, says: object = ""
) -> None:
    """Within twice the reference's own error at this dtype and a few eps.

    Softmax's gradient is a difference. Where a query sees one key the reference's is exactly zero, and a kernel's is
    what rounding leaves of it in float32: a few eps of that, of the terms that cancel.
    """
    terms = float(truth.pop("terms")) * torch.finfo(torch.float32).eps
    for what, value in truth.items():
        floor = eps if what in ("out", "v") else eps + terms
        budget = 2 * relative_error(rough[what], value) + 8 * floor
        assert found[what].isfinite().all(), f"{says} {what} is not finite"
        error = relative_error(found[what], value)
        assert error < budget, f"{says} {what}: {error:.2e}, not {budget:.2e}"


def check(
    primal: Primal,
    shape: Shape,
    dtype: torch.dtype,
    *,
    impl: str = "ragged",
    dense: str = "reference",
    eps: float | None = None,
    **others: object,
) -> None:
    """An executor against a dense one: outputs and all gradients."""
    found = run(primal, shape, impl, dtype, **others)  # type: ignore[arg-type]
    with rounded_at_every_step():
        rough = run(primal, shape, dense, dtype, **others)  # type: ignore[arg-type]
    truth = run(primal, shape, dense, torch.float64, rounded=dtype, **others)  # type: ignore[arg-type]
    assert_close(found, rough, truth, eps or torch.finfo(dtype).eps, f"{shape} {others}")


_ALL = 0xFFFFFFFF
OWN = 1 << 30
"""The column, to dropout, of a causal query's own running window."""


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _ALL
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _ALL
    return x ^ (x >> 16)


def kept(seed: int, batch: int, heads: Sequence[int], of: int, columns: Tensor, p: float) -> Tensor:
    """Boolean [batch, heads, L, W]: what the kernels keep of the weights of these heads, `of` so many; columns [L, W].

    The hash of `ragged_parts`, in 64-bit integers.
    """
    seed &= _ALL
    batch_head = (torch.arange(batch)[:, None] * of + torch.tensor(list(heads))).to(columns.device)
    rows = torch.arange(columns.shape[0], device=columns.device)
    row_bits = _mix((_mix(seed ^ batch_head)[:, :, None] + rows) & _ALL) | 1
    powers = torch.tensor([pow(0x915F77F5, n, 2**32) for n in range(8)], device=columns.device)
    group = columns & 7 | columns >> 6 << 3
    column_bits = _mix(((seed ^ 0x9E3779B9) + group * 0x9E3779B1) & _ALL) | 1
    column_bits = (column_bits * powers[columns >> 3 & 7]) & _ALL
    return (row_bits[..., None] * column_bits) & _ALL >= int(p * 2**32)


@contextmanager
def replayed(primal: Primal, heads: int, seed: int, is_causal: bool = False) -> Iterator[None]:
    """Inside, the kernels draw from this seed, and the reference drops what they drop."""
    heads_of = dict(GroupHeadsByScale.groups(primal.training_set.head_scales(heads)))
    attend, scale = reference._attend, 0

    def attend_at_scale(p: Problem) -> tuple[Tensor, Tensor | None]:
        nonlocal scale
        scale = p.scale
        return attend(p)

    def dropout(weights: Tensor, p: float) -> Tensor:
        batch, _, queries, points = weights.shape
        columns = torch.arange(points, device=weights.device).expand(queries, -1)
        if is_causal and scale > 1:
            own = torch.arange(queries, device=weights.device)[:, None] // scale
            columns = columns.where(columns != own, OWN)
        return weights * kept(seed, batch, heads_of[scale], heads, columns, p) / (1 - p)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "seed_of", lambda x, p: torch.tensor([seed], dtype=torch.int32, device=x.device))
        patch.setattr(reference, "dropout", dropout)
        patch.setattr(reference, "_attend", attend_at_scale)
        yield
    assert scale, "the reference did not run"


@contextmanager
def adding_up(*adding: int) -> Iterator[list[str]]:
    """Inside, blocks of keys add their shares of dq, in blocks of this shape; gives the names of what is launched."""
    tiles, launch, names = ragged_work.tiles, launching.launch, []

    def note(key: tuple[object, ...], *others: Any, **more: Any) -> None:
        names.append(str(key[0]))
        launch(key, *others, **more)

    ragged_work.work.kept.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_work, "tiles", lambda *of: tiles(*of)._replace(adding=adding))
        patch.setattr(ragged_work, "_sweeps_keep_busy", lambda *of: False)
        patch.setattr(launching, "_ready", Kept(1024))
        patch.setattr(launching, "launch", note)
        yield names
    ragged_work.work.kept.clear()


@contextmanager
def sweeping() -> Iterator[None]:
    """Inside, the backward pass goes over whole heads in one sweep, however few there are."""
    tiles = ragged_work.tiles
    ragged_work.work.kept.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_work, "tiles", lambda *of: tiles(*of)._replace(adding=()))
        patch.setattr(ragged_work, "_sweeps_keep_busy", lambda *of: True)
        patch.setattr(launching, "_ready", Kept(1024))
        yield
    ragged_work.work.kept.clear()
