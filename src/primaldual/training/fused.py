"""The parts of a training step as functions with gradients: matrix products by the library, the rest in few passes."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..ops.ragged_launch import interpreted, without_triton

MULTIPROCESSORS = 132
"""Of a large GPU. A pass has as many programs as they hold at once: more would wait, and run when others idle."""

TILE, STAGES = 2048, 4
"""Elements of a tile, and tiles that a program has at hand: all but one are on their way."""

MOMENTUM, EPS = 0.1, 1e-5


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this device and dtype."""
    if without_triton() or dtype == torch.float64:
        return False
    return device.type == "cuda" or interpreted()


def _kernels() -> ModuleType:
    from . import fused_kernels

    return fused_kernels


class Dropout(NamedTuple):
    """A share, and the seed [1] of one place in the model."""

    p: float
    seed: Tensor

    @property
    def numbers(self) -> tuple[int, float]:
        """The hash below which an entry is dropped, and the factor of the others."""
        return round(self.p * 2**32), 1.0 / (1.0 - self.p)


class Norm(NamedTuple):
    """What normalises: batch norm where there are running moments, else layer norm."""

    weight: Tensor
    bias: Tensor
    mean: Tensor | None
    variance: Tensor | None


class _Pass(NamedTuple):
    """How [members, rows, width] is divided among programs: rows and columns of a tile, rows of a run."""

    members: int
    rows: int
    width: int
    tile_rows: int
    tile_columns: int
    span: int

    @property
    def runs(self) -> int:
        return -(-self.rows // self.span)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.runs, -(-self.width // self.tile_columns), self.members

    @property
    def shape(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {"D": self.width, "BR": self.tile_rows, "BD": self.tile_columns, "STAGES": STAGES}


def _divided(x: Tensor, each: int, whole_rows: bool = False) -> _Pass:
    """For a kernel of which a multiprocessor holds `each` programs."""
    members, rows, width = x.shape
    columns = _power(width) if whole_rows else _columns(width)
    tile = max(1, TILE // columns)
    programs = max(1, each * MULTIPROCESSORS // (members * -(-width // columns)))
    span = -(-rows // programs)
    return _Pass(members, rows, width, tile, columns, -(-span // tile) * tile)


def _columns(width: int) -> int:
    """A power of 2: a divisor of the width unless that is small."""
    divisor = width & -width
    return min(divisor, 256) if divisor >= 64 else min(_power(width), 64)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """[members, out, in] from [members, rows, out] and [members, rows, in].

    A product of few entries over many rows is divided among multiprocessors by rows.
    """
    members, rows, out = dy.shape
    tiles = members * -(-out // 64) * -(-x.shape[-1] // 64)
    parts = 1
    while parts * tiles < 132 and rows % (2 * parts) == 0 and rows // (2 * parts) >= 256:
        parts *= 2
    if parts == 1:
        return torch.bmm(dy.mT, x)
    dy, x = (t.reshape(members * parts, rows // parts, -1) for t in (dy, x))
    return _fold(torch.bmm(dy.mT, x).unflatten(0, (members, parts)), x.dtype)


def _fold(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the second dimension."""
    members, runs = x.shape[:2]
    y = x.new_empty(members, *x.shape[2:], dtype=dtype)
    width = y[0].numel()
    columns, tile = (16, 64) if runs > 16 else (256, _power(runs))
    _kernels().fold[(-(-width // columns), members)](x, y, runs, width, BD=columns, BP=tile)
    return y


def _row_sum(x: Tensor) -> Tensor:
    """[members, width], the sum over rows."""
    how = _divided(x, 8)
    sums = x.new_empty(how.members, how.runs, how.width, dtype=torch.float32)
    _kernels().column_sums[how.grid](x, sums, how.rows, how.span, **how.shape)
    return _fold(sums, x.dtype)


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, positions: Tensor, factor: float, drop: Dropout | None) -> Tensor:
        members, rows, width = x.shape
        length = positions.shape[1]
        ctx.about = (length, factor, drop, bias.dtype, positions.dtype)
        y = torch.empty_like(x)
        grid, shape = _by_steps(members, length, width)
        seed, numbers = _drop_arguments(drop, x)
        _kernels().embed[grid](
            x, bias, positions, seed, y, bias.stride(0), positions.stride(0), rows // length, length, factor, *numbers,
            **shape, DROPOUT=drop is not None,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dy = gradients[0].contiguous()
        length, factor, drop, bias_dtype, dtype = ctx.about
        members, rows, width = dy.shape
        dx = torch.empty_like(dy)
        dpositions = dy.new_empty(members, length, width, dtype=torch.float32)
        grid, shape = _by_steps(members, length, width)
        seed, numbers = _drop_arguments(drop, dy)
        _kernels().embed_backward[grid](
            dy, seed, dx, dpositions, rows // length, length, factor, *numbers, **shape, DROPOUT=drop is not None
        )  # fmt: skip
        return dx, (dpositions.sum(1) * factor).to(bias_dtype), dpositions.to(dtype), None, None


def _by_steps(members: int, length: int, width: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Programs, each with some steps of all series, and what they are compiled for: eight elements a thread."""
    columns = _columns(width)
    share = members * length * width // (4 * MULTIPROCESSORS)
    elements = min(1024, max(256, _power(share + 1) // 2))
    tile = max(1, elements // columns)
    warps = max(1, tile * columns // 256)
    shape = {"D": width, "BR": tile, "BD": columns, "STAGES": STAGES, "num_warps": warps}
    return (-(-length // tile), -(-width // columns), members), shape


def embed(x: Tensor, bias: Tensor, positions: Tensor, factor: float, drop: Dropout | None) -> Tensor:
    """dropout(factor · (x + bias) + positions) of x [members, batch · length, width]."""
    return _Embed.apply(x, bias, positions, factor, drop)


def _drop_arguments(drop: Dropout | None, x: Tensor) -> tuple[Tensor, tuple[int, float]]:
    return (x, (0, 1.0)) if drop is None else (drop.seed, drop.numbers)


def _normalised(
    x: Tensor, a: Tensor, a_bias: Tensor, norm: Norm, drop: Dropout | None, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """norm(x + dropout(a + a_bias)); what was normalised; and its moments."""
    of_batch, kernels = norm.mean is not None, _kernels()
    how = _divided(x, 4)
    r, y = torch.empty_like(x), torch.empty_like(x)
    seed, numbers = _drop_arguments(drop, x)
    sums = x.new_empty(how.members, how.runs, 2, how.width, dtype=torch.float32) if of_batch and training else x
    kernels.add[how.grid](
        x, a, a_bias, seed, norm.mean if of_batch else x, r, sums, a_bias.stride(0), how.rows, how.span, *numbers,
        **how.shape, DROPOUT=drop is not None, SUMS=of_batch and training,
    )  # fmt: skip
    assert norm.weight.stride(0) == norm.bias.stride(0)
    if not of_batch:
        warps = 8 if x.shape[-1] >= 512 else 4
        how = _divided(x, 32 // warps, whole_rows=True)
        moments = x.new_empty(how.members, how.rows, 2, dtype=torch.float32)
        kernels.layer_normal[how.grid](
            r, norm.weight, norm.bias, y, moments, norm.weight.stride(0), how.rows, how.span, EPS, **how.shape,
            num_warps=warps,
        )  # fmt: skip
        return y, r, moments
    assert norm.mean is not None and norm.variance is not None
    if training:
        moments = x.new_empty(how.members, 2, how.width, dtype=torch.float32)
        kernels.batch_moments[(-(-how.width // 16), how.members)](
            sums, norm.mean, norm.variance, moments, how.rows, how.runs, MOMENTUM, EPS, D=how.width, BD=16, BP=64
        )
    else:
        moments = torch.stack((norm.mean, (norm.variance + EPS).rsqrt()), 1)
    how = _divided(x, 8)
    kernels.batch_normal[how.grid](
        r, moments, norm.weight, norm.bias, y, norm.weight.stride(0), how.rows, how.span, **how.shape
    )
    return y, r, moments


def _normalised_backward(
    dy: Tensor, r: Tensor, moments: Tensor, weight: Tensor, of_batch: bool, drop: Dropout | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a, a_bias, and of the norm's weight and bias."""
    kernels = _kernels()
    dr = torch.empty_like(r)
    da = dr if drop is None else torch.empty_like(r)
    seed, numbers = _drop_arguments(drop, r)
    if not of_batch:
        warps = 8 if r.shape[-1] >= 512 else 4
        how = _divided(r, 16 // warps, whole_rows=True)
        sums = r.new_empty(how.members, how.runs, 3, how.width, dtype=torch.float32)
        kernels.layer_backward[how.grid](
            dy, r, moments, weight, seed, dr, da, sums, weight.stride(0), how.rows, how.span, *numbers, **how.shape,
            DROPOUT=drop is not None, num_warps=warps,
        )  # fmt: skip
        dbias, dweight, da_bias = _fold(sums, torch.float32).unbind(1)
        return dr, da, da_bias, dweight, dbias
    how = _divided(r, 6)
    sums = r.new_empty(how.members, how.runs, 2, how.width, dtype=torch.float32)
    kernels.batch_sums[how.grid](dy, r, moments, sums, how.rows, how.span, **how.shape)
    found = r.new_empty(how.members, 2, how.width, dtype=torch.float32)
    kernels.batch_gradients[(-(-how.width // 16), how.members)](sums, found, how.runs, D=how.width, BD=16, BP=64)
    how = _divided(r, 4)
    da_sums = r.new_empty(how.members, how.runs, how.width, dtype=torch.float32)
    kernels.batch_backward[how.grid](
        dy, r, moments, found, weight, seed, dr, da, da_sums, weight.stride(0), how.rows, how.span, *numbers,
        **how.shape, DROPOUT=drop is not None,
    )  # fmt: skip
    return dr, da, _fold(da_sums, r.dtype), found[:, 1], found[:, 0]


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor,
        mean: Tensor | None, variance: Tensor | None, drop: Dropout | None, training: bool,
    ) -> Tensor:  # fmt: skip
        norm = Norm(norm_weight, norm_bias, mean, variance)
        branch = torch.bmm(a, weight.mT)
        y, r, moments = _normalised(x, branch, bias, norm, drop, training)
        ctx.save_for_backward(a, weight, r, moments, norm_weight)
        ctx.about = (mean is not None, drop, bias.dtype)
        if not training:
            ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, weight, r, moments, norm_weight = ctx.saved_tensors
        of_batch, drop, dtype = ctx.about
        dr, da, dbias, *of_norm = _normalised_backward(
            gradients[0].contiguous(), r, moments, norm_weight, of_batch, drop
        )
        return (
            dr, torch.bmm(da, weight), weight_gradient(da, a), dbias.to(dtype), *of_norm, None, None, None, None
        )  # fmt: skip


def add_norm(
    x: Tensor, a: Tensor, weight: Tensor, bias: Tensor, norm: Norm, drop: Dropout | None, training: bool
) -> Tensor:
    """norm(x + dropout(a · weightᵀ + bias)), of [members, rows, width]; gradients in training alone."""
    return _AddNorm.apply(x, a, weight, bias, *norm, drop, training)


class _FeedForward(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, norm_weight: Tensor,
        norm_bias: Tensor, mean: Tensor | None, variance: Tensor | None, drop1: Dropout | None, drop2: Dropout | None,
        training: bool,
    ) -> Tensor:  # fmt: skip
        h = torch.bmm(x, weight1.mT)
        hidden = torch.empty_like(h)
        how = _divided(h, 8)
        seed, numbers = _drop_arguments(drop1, h)
        _kernels().activate[how.grid](
            h, bias1, seed, hidden, bias1.stride(0), how.rows, how.span, *numbers, **how.shape,
            DROPOUT=drop1 is not None,
        )  # fmt: skip
        norm = Norm(norm_weight, norm_bias, mean, variance)
        branch = torch.bmm(hidden, weight2.mT)
        y, r, moments = _normalised(x, branch, bias2, norm, drop2, training)
        ctx.save_for_backward(x, weight1, bias1, weight2, h, hidden, r, moments, norm_weight)
        ctx.about = (mean is not None, drop1, drop2)
        if not training:
            ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight1, bias1, weight2, h, hidden, r, moments, norm_weight = ctx.saved_tensors
        of_batch, drop1, drop2 = ctx.about
        dx, da, dbias2, *of_norm = _normalised_backward(
            gradients[0].contiguous(), r, moments, norm_weight, of_batch, drop2
        )
        if drop2 is None:
            da = dx.clone()  # dx is added to below
        dhidden = torch.bmm(da, weight2)
        dh = torch.empty_like(h)
        how = _divided(h, 6)
        sums = h.new_empty(how.members, how.runs, how.width, dtype=torch.float32)
        seed, numbers = _drop_arguments(drop1, h)
        _kernels().activate_backward[how.grid](
            dhidden, h, bias1, seed, dh, sums, bias1.stride(0), how.rows, how.span, *numbers, **how.shape,
            DROPOUT=drop1 is not None,
        )  # fmt: skip
        dweight2, dweight1 = weight_gradient(da, hidden), weight_gradient(dh, x)
        return (
            dx.baddbmm_(dh, weight1), dweight1, _fold(sums, bias1.dtype), dweight2, dbias2.to(bias1.dtype),
            *of_norm, None, None, None, None, None,
        )  # fmt: skip


def feed_forward(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, norm: Norm,
    drops: tuple[Dropout | None, Dropout | None], training: bool,
) -> Tensor:  # fmt: skip
    """norm(x + dropout(dropout(gelu(x · weight1ᵀ + bias1)) · weight2ᵀ + bias2)); gradients in training alone."""
    return _FeedForward.apply(x, weight1, bias1, weight2, bias2, *norm, *drops, training)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)
        if bias is None:
            return torch.bmm(x, weight.mT), x.view_as(x)
        y = x.new_empty(*x.shape[:2], weight.shape[1])
        for i in range(len(x)):  # the library adds a bias on the way, but to one product, not to a batch of them
            torch.addmm(bias[i], x[i], weight[i].T, out=y[i])
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        dy, dx = gradients
        if dy is None:
            return dx, None, None
        dy = dy.contiguous()
        if ctx.needs_input_grad[0]:
            dx = torch.bmm(dy, weight) if dx is None else dx.contiguous().baddbmm_(dy, weight)
        return dx, weight_gradient(dy, x), _row_sum(dy) if ctx.has_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, of [members, rows, width]."""
    return _Linear.apply(x, weight, bias)[0]


def linear_beside(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`linear`, and x again, for `add_norm` and nothing else: to the gradient from there dx is added in place."""
    return _Linear.apply(x, weight, bias)


class _Head(Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, padding: Tensor | None, drop: Dropout | None
    ) -> Tensor:
        members, cases, length, width = z.shape
        outputs = weight.shape[1]
        block, columns = max(16, _power(outputs)), 64
        span = -(-length * width // max(1, 5 * MULTIPROCESSORS // members))
        span = -(-span // columns) * columns
        runs = -(-length * width // span)
        parts = z.new_empty(members, runs, cases, outputs, dtype=torch.float32)
        seed, numbers = _drop_arguments(drop, z)
        tile = min(64, max(16, _power(cases)))
        _kernels().head[(runs, -(-cases // tile), members)](
            z, weight, z if padding is None else padding, seed, parts, weight.stride(0), cases, length, outputs, span,
            *numbers, D=width, BC=tile, BK=columns, BO=block, DROPOUT=drop is not None,
            HAS_PADDING=padding is not None, PRECISION=_precision(weight), num_stages=STAGES,
        )  # fmt: skip
        ctx.save_for_backward(z, weight, padding)
        ctx.about = (drop, bias.dtype)
        return (_fold(parts, torch.float32) + bias.unsqueeze(1)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        z, weight, padding = ctx.saved_tensors
        drop, dtype = ctx.about
        dscores = gradients[0].contiguous()
        members, cases, length, width = z.shape
        outputs = weight.shape[1]
        dz, dweight = torch.empty_like(z), torch.empty_like(weight, memory_format=torch.contiguous_format)
        seed, numbers = _drop_arguments(drop, z)
        columns = 128 if outputs <= 16 else 64
        _kernels().head_backward[(-(-length * width // columns), members)](
            z, weight, z if padding is None else padding, seed, dscores, dz, dweight, weight.stride(0), cases, length,
            outputs, *numbers, D=width, BC=16, BK=columns, BO=max(16, _power(outputs)), DROPOUT=drop is not None,
            HAS_PADDING=padding is not None, PRECISION=_precision(weight), num_stages=STAGES,
        )  # fmt: skip
        return dz, dweight, dscores.sum(1).to(dtype), None, None


def _precision(x: Tensor) -> str:
    return "tf32" if x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def head(z: Tensor, weight: Tensor, bias: Tensor, padding: Tensor | None, drop: Dropout | None) -> Tensor:
    """dropout(gelu(z)), 0 at padded steps, flattened and multiplied: z [members, cases, length, width]."""
    return _Head.apply(z, weight, bias, padding, drop)
