# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""The model's head as Triton kernels: GELU, dropout and the product of a whole series with few outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import COMPILED, drop
from .activation_kernels import gelu, normal
from .hashes import hash_columns, hash_rows, member_seed
from .runs import drops


@triton.jit
def _drop_both(x, y, row_bits, column_bits, threshold):
    """As `drop`, of two. They have one layout then, and what they have in common is computed once."""
    threshold = threshold.to(tl.uint32)
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred kept;
            .reg .u32 bits;
            mul.lo.u32 bits, $4, $5;
            setp.ge.u32 kept, bits, $6;
            selp.f32 $0, $2, 0f00000000, kept;
            selp.f32 $1, $3, 0f00000000, kept;
            }""",
            "=r,=r,r,r,r,r,r", [x, y, row_bits, column_bits, threshold], dtype=(tl.float32, tl.float32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        kept = row_bits * column_bits >= threshold
        return tl.where(kept, x, 0.0), tl.where(kept, y, 0.0)


@triton.jit
def _padded(padding_ptr, case, place, here, length, D: tl.constexpr):
    return tl.load(padding_ptr + case[:, None] * length + place[None, :] // D, mask=here, other=1) != 0


@triton.jit
def head(
    z_ptr, weight_ptr, padding_ptr, seed_ptr, parts_ptr, weight_member, cases, length, outputs, span, threshold, boost,
    D: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of dropout(gelu(z)), 0 at padded steps: [members, runs, cases, outputs], each of a run of the columns."""
    member = tl.program_id(2).to(tl.int64)
    case = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * span
    width = length * D
    output = tl.arange(0, BO)
    z_ptr += member * cases * width
    weight_ptr += member * weight_member
    seed = member_seed(seed_ptr, member)
    row_bits = hash_rows(seed, case)
    scores = tl.zeros((BC, BO), tl.float32)
    for start in range(first, tl.minimum(first + span, width), BK):
        place = start + tl.arange(0, BK)
        here = (case[:, None] < cases) & (place[None, :] < width)
        z = tl.load(z_ptr + case[:, None].to(tl.int64) * width + place[None, :], mask=here, other=0.0).to(tl.float32)
        if HAS_PADDING:
            z = tl.where(_padded(padding_ptr + member * cases * length, case, place, here, length, D), 0.0, z)
        z = gelu(z, z_ptr.dtype.element_ty == tl.float32)
        if DROPOUT:
            z = drop(z, row_bits[:, None], hash_columns(seed, place)[None, :], threshold)
        weight = tl.load(
            weight_ptr + output[None, :] * width + place[:, None],
            mask=(output[None, :] < outputs) & (place[:, None] < width), other=0.0,
        )  # fmt: skip
        scores = tl.dot(z.to(weight.dtype), weight, scores, input_precision=PRECISION)
    at = ((member * tl.num_programs(0) + tl.program_id(0)) * cases + case[:, None]) * outputs + output[None, :]
    tl.store(parts_ptr + at, scores * boost, mask=(case[:, None] < cases) & (output[None, :] < outputs))


@triton.jit
def head_backward(
    z_ptr, weight_ptr, padding_ptr, seed_ptr, dscores_ptr, dz_ptr, dweight_ptr, weight_member, cases, length, outputs,
    threshold, boost,
    D: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz, and the weight's gradient [members, outputs, length · D], of some columns."""
    member = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BK + tl.arange(0, BK)
    width = length * D
    output = tl.arange(0, BO)
    z_ptr += member * cases * width
    dz_ptr += member * cases * width
    seed, column_bits = drops(seed_ptr, member, place)
    inside = (output[:, None] < outputs) & (place[None, :] < width)
    weight = tl.load(
        weight_ptr + member * weight_member + output[:, None] * width + place[None, :], mask=inside, other=0.0
    )
    dweight = tl.zeros((BO, BK), tl.float32)
    for start in range(0, cases, BC):
        case = start + tl.arange(0, BC)
        here = (case[:, None] < cases) & (place[None, :] < width)
        at = case[:, None].to(tl.int64) * width + place[None, :]
        z = tl.load(z_ptr + at, mask=here, other=0.0).to(tl.float32)
        dscores = tl.load(
            dscores_ptr + (member * cases + case[:, None]) * outputs + output[None, :],
            mask=(case[:, None] < cases) & (output[None, :] < outputs), other=0.0,
        ).to(weight.dtype)  # fmt: skip
        below, density = normal(z, z_ptr.dtype.element_ty == tl.float32)
        y = z * below
        dz = tl.dot(dscores, weight, input_precision=PRECISION) * ((below + z * density) * boost)
        if DROPOUT:
            y, dz = _drop_both(y, dz, hash_rows(seed, case)[:, None], column_bits[None, :], threshold)
        if HAS_PADDING:
            padded = _padded(padding_ptr + member * cases * length, case, place, here, length, D)
            y = tl.where(padded, 0.0, y)
            dz = tl.where(padded, 0.0, dz)
        dweight = tl.dot(tl.trans(dscores), y.to(weight.dtype), dweight, input_precision=PRECISION)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=here)
    at = (member * outputs + output[:, None]) * width + place[None, :]
    tl.store(dweight_ptr + at, (dweight * boost).to(dweight_ptr.dtype.element_ty), mask=inside)
