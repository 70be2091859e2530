# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Triton kernels of causal linear attention: each program walks one segment of the sequence, chunk by chunk.

The state (S, z) before query i's chunk is kept in float32; keys j ≤ i of the chunk itself enter by their kernel
κ_ij = Φ(q_i)·w_jΦ(k_j). With u the largest z_f after the chunk,

    out_i = (Σ_f Φ_f(q_i) S_f/u + Σ_{j≤i} κ_ij/u v_j)/h_i,   h_i = Σ_f Φ_f(q_i) z_f/u + Σ_{j≤i} κ_ij/u.

A segment starts from the sum of the segments before it; the gradients of keys and values walk backwards, from the sum
of those after it. Names, grid and accumulation are those of `linear_kernels`.

States are carried as [C, F], grown by vᵀΦ(k): features are the right side, which lies in shared memory once for all
products with them. Grown by Φ(k)ᵀv, with the left side in registers and v loaded ahead, the product may be left in
flight into the next chunk, whose features overwrite those registers (triton-lang/triton#9433). Normalizers are plain
sums, in all kernels alike: as a product with a matrix of a few columns, made anew for each chunk, they came out wrong
on Hopper.
"""

import triton
import triton.language as tl

from .kernels import (
    features,
    head,
    inverse,
    load,
    load_map,
    load_omega,
    load_state,
    load_weights,
    store,
    store_moments,
    store_state,
    through_features,
)


@triton.jit
def sum_before(states, sums, segments, size, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """sums_s = Σ_{t<s} states_t for each head and number of the state, in order; REVERSE: Σ_{t>s}."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * segments * size
    total = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(0, segments, num_stages=4):
        at = first + (segments - 1 - step if REVERSE else step) * size + i
        tl.store(sums + at, total, i < size)
        total += tl.load(states + at, i < size, other=0.0)


@triton.jit
def attend_causal(
    q, k, v, weight, shift, scale, omega, state, out, q_strides, k_strides, v_strides, weight_strides, out_strides,
    H, queries, keys, per_program,
    EVEN: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    RANDOM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment, from the state before it."""
    dtype: tl.constexpr = q.dtype.element_ty
    first = tl.program_id(1) * per_program
    q, out = head(q, q_strides, H), head(out, out_strides, H)
    k, v = head(k, k_strides, H), head(v, v_strides, H)
    a, c = load_map(shift, scale, D, BLOCK_D)
    om = load_omega(omega, D, F, BLOCK_D, BLOCK_F)
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    S, z = load_state(state, index, F, C, BLOCK_F, BLOCK_C)
    S = tl.trans(S)
    earlier = tl.arange(0, BLOCK)[None, :] <= tl.arange(0, BLOCK)[:, None]  # [queries, keys]
    for start in tl.range(first, tl.minimum(first + per_program, queries), BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        x = (load(q, q_strides, n, queries, D, BLOCK_D, EVEN).to(tl.float32) - a) * c
        y = (load(k, k_strides, n, keys, D, BLOCK_D, EVEN).to(tl.float32) - a) * c
        values = load(v, v_strides, n, keys, C, BLOCK_C, EVEN)
        phi = features(x, om, dtype, D, F, BLOCK_F, RANDOM, True, PRECISION)
        phi_q = phi.to(dtype)
        phi_k = features(y, om, dtype, D, F, BLOCK_F, RANDOM, False, PRECISION)
        if not EVEN or weight is not None:
            phi_k *= load_weights(weight, weight_strides, n, keys, H)[:, None]
        after = z + tl.sum(phi_k, 0)
        phi_k = phi_k.to(dtype)
        over_unit = inverse(tl.max(after, 0))
        kernel = tl.dot(phi_q, tl.trans(phi_k), input_precision=PRECISION)
        kernel = tl.where(earlier, kernel * over_unit, 0.0)
        h = tl.sum(phi * (z * over_unit)[None, :], 1) + tl.sum(kernel, 1)
        o = tl.dot(phi_q, tl.trans((S * over_unit).to(dtype)), input_precision=PRECISION)
        o = tl.dot(kernel.to(dtype), values, o, input_precision=PRECISION)
        store(out, out_strides, n, queries, o * inverse(h)[:, None], C, BLOCK_C, EVEN)
        S = tl.dot(tl.trans(values), phi_k, S, input_precision=PRECISION)
        z = after


@triton.jit
def causal_query_gradients(
    q, k, v, grad, weight, shift, scale, omega, state, grad_q, partial, moments, normalizer, deltas,
    q_strides, k_strides, v_strides, grad_strides, weight_strides, grad_q_strides, H, queries, keys, per_program,
    EVEN: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    RANDOM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With G_if = g_i·S_f/u, G_ij = g_i·v_j and δ_i = g_i·out_i = (Σ_f Φ_f(q_i) G_if + Σ_{j≤i} κ_ij/u G_ij)/h_i:

    ∂/∂Φ_f(q_i) = (G_if − δ_i z_f/u + Σ_{j≤i} (G_ij − δ_i) w_jΦ_f(k_j)/u)/h_i.

    partial = (Σ_i Φ(q_i) g_iᵀ/(u h_i), −Σ_i Φ(q_i) δ_i/(u h_i)), what earlier keys need of the segment. The normalizers
    u h_i and δ_i are kept for the way back.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    first = tl.program_id(1) * per_program
    q, grad, grad_q = head(q, q_strides, H), head(grad, grad_strides, H), head(grad_q, grad_q_strides, H)
    k, v = head(k, k_strides, H), head(v, v_strides, H)
    a, c = load_map(shift, scale, D, BLOCK_D)
    om = load_omega(omega, D, F, BLOCK_D, BLOCK_F)
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    S, z = load_state(state, index, F, C, BLOCK_F, BLOCK_C)
    S = tl.trans(S)
    R, r = tl.zeros((BLOCK_C, BLOCK_F), tl.float32), tl.zeros((BLOCK_F,), tl.float32)
    moment1, moment2 = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    earlier = tl.arange(0, BLOCK)[None, :] <= tl.arange(0, BLOCK)[:, None]  # [queries, keys]
    for start in tl.range(first, tl.minimum(first + per_program, queries), BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        offset = load(q, q_strides, n, queries, D, BLOCK_D, EVEN).to(tl.float32) - a
        y = (load(k, k_strides, n, keys, D, BLOCK_D, EVEN).to(tl.float32) - a) * c
        values = load(v, v_strides, n, keys, C, BLOCK_C, EVEN)
        g = load(grad, grad_strides, n, queries, C, BLOCK_C, EVEN)
        x = offset * c
        phi = features(x, om, dtype, D, F, BLOCK_F, RANDOM, True, PRECISION)
        phi_q = phi.to(dtype)
        phi_k = features(y, om, dtype, D, F, BLOCK_F, RANDOM, False, PRECISION)
        if not EVEN or weight is not None:
            phi_k *= load_weights(weight, weight_strides, n, keys, H)[:, None]
        after = z + tl.sum(phi_k, 0)
        phi_k = phi_k.to(dtype)
        unit = tl.max(after, 0)
        over_unit = inverse(unit)
        kernel = tl.dot(phi_q, tl.trans(phi_k), input_precision=PRECISION)
        kernel = tl.where(earlier, kernel * over_unit, 0.0)
        z *= over_unit
        h = tl.sum(phi * z[None, :], 1) + tl.sum(kernel, 1)
        over_h = inverse(h)
        G_own = tl.dot(g, tl.trans(values), input_precision=PRECISION)
        delta = tl.sum(kernel * G_own, 1)
        G = tl.dot(g, (S * over_unit).to(dtype), input_precision=PRECISION)
        delta = (delta + tl.sum(phi * G, 1)) * over_h
        own = tl.where(earlier, G_own - delta[:, None], 0.0).to(dtype)
        own = tl.dot(own, phi_k, input_precision=PRECISION) * over_unit
        grad_phi = (G - delta[:, None] * z[None, :] + own) * over_h[:, None]
        grad_x = through_features(x, phi, grad_phi, om, dtype, D, RANDOM, PRECISION)
        store(grad_q, grad_q_strides, n, queries, grad_x * c, D, BLOCK_D, EVEN)
        row = tl.program_id(0).to(tl.int64) * queries + n
        tl.store(normalizer + row, h * unit, n < queries)
        tl.store(deltas + row, delta, n < queries)
        R += tl.dot(tl.trans(g), (phi * over_h[:, None]).to(dtype), input_precision=PRECISION) * over_unit
        r -= tl.sum(phi * (delta * over_h)[:, None], 0) * over_unit
        S = tl.dot(tl.trans(values), phi_k, S, input_precision=PRECISION)
        z = after
        if moments is not None:
            moment1 += tl.sum(grad_x, 0)
            moment2 += tl.sum(grad_x * offset, 0)
    store_state(partial, index, tl.trans(R), r, F, C, BLOCK_F, BLOCK_C)
    if moments is not None:
        store_moments(moments, index, moment1, moment2, D, BLOCK_D)


@triton.jit
def causal_key_gradients(
    q, k, v, grad, weight, shift, scale, omega, after, normalizer, deltas, grad_k, grad_v, grad_weight, moments,
    q_strides, k_strides, v_strides, grad_strides, weight_strides, grad_k_strides, grad_v_strides,
    H, queries, keys, per_program,
    EVEN: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    RANDOM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With H_i the normalizers, (R, r) = (Σ_i Φ(q_i) g_iᵀ/H_i, −Σ_i Φ(q_i) δ_i/H_i) over the queries after the chunk,
    and t, the unit here, the largest H_i of the chunk:

    ∂/∂v_j = (w_jΦ(k_j) tR + Σ_{i≥j} κ_ij g_i t/H_i)/t,
    ∂/∂(w_jΦ(k_j)) = (tR v_j + Σ_{i≥j} (g_i·v_j − δ_i) Φ(q_i) t/H_i)/t + r.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    first = tl.program_id(1) * per_program
    q, grad = head(q, q_strides, H), head(grad, grad_strides, H)
    k, grad_k = head(k, k_strides, H), head(grad_k, grad_k_strides, H)
    v, grad_v = head(v, v_strides, H), head(grad_v, grad_v_strides, H)
    a, c = load_map(shift, scale, D, BLOCK_D)
    om = load_omega(omega, D, F, BLOCK_D, BLOCK_F)
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    R, r = load_state(after, index, F, C, BLOCK_F, BLOCK_C)
    R = tl.trans(R)
    moment1, moment2 = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    later = tl.arange(0, BLOCK)[None, :] >= tl.arange(0, BLOCK)[:, None]  # [keys, queries]
    chunks = tl.cdiv(tl.minimum(per_program, queries - first), BLOCK)
    for step in tl.range(0, chunks, num_stages=STAGES):
        n = first + (chunks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        x = (load(q, q_strides, n, queries, D, BLOCK_D, EVEN).to(tl.float32) - a) * c
        offset = load(k, k_strides, n, keys, D, BLOCK_D, EVEN).to(tl.float32) - a
        values = load(v, v_strides, n, keys, C, BLOCK_C, EVEN)
        g = load(grad, grad_strides, n, queries, C, BLOCK_C, EVEN)
        row = tl.program_id(0).to(tl.int64) * queries + n
        h = tl.load(normalizer + row, n < queries, other=0.0)
        delta = tl.load(deltas + row, n < queries, other=0.0)
        t = tl.max(h, 0)
        t = tl.where(t > 0, t, 1.0)
        over_t = 1.0 / t
        y = offset * c
        phi_q = features(x, om, dtype, D, F, BLOCK_F, RANDOM, True, PRECISION)
        phi_q = (phi_q * (t * inverse(h))[:, None]).to(dtype)
        phi_k = features(y, om, dtype, D, F, BLOCK_F, RANDOM, False, PRECISION)
        w = load_weights(weight, weight_strides, n, keys, H)
        weighted = (phi_k * w[:, None]).to(dtype)
        R_low = (R * t).to(dtype)
        kernel = tl.dot(weighted, tl.trans(phi_q), input_precision=PRECISION)
        grad_values = tl.dot(weighted, tl.trans(R_low), input_precision=PRECISION)
        kernel = tl.where(later, kernel, 0.0).to(dtype)
        grad_values = tl.dot(kernel, g, grad_values, input_precision=PRECISION) * over_t
        store(grad_v, grad_v_strides, n, keys, grad_values, C, BLOCK_C, EVEN)
        own = tl.dot(values, tl.trans(g), input_precision=PRECISION) - delta[None, :]
        grad_phi = tl.dot(values, R_low, input_precision=PRECISION)
        grad_phi = tl.dot(tl.where(later, own, 0.0).to(dtype), phi_q, grad_phi, input_precision=PRECISION)
        grad_phi = grad_phi * over_t + r[None, :]
        if weight is not None:
            at = grad_weight + tl.program_id(0).to(tl.int64) * keys + n
            tl.store(at, tl.sum(phi_k * grad_phi, 1), n < keys)
        grad_x = through_features(y, phi_k, grad_phi * w[:, None], om, dtype, D, RANDOM, PRECISION)
        store(grad_k, grad_k_strides, n, keys, grad_x * c, D, BLOCK_D, EVEN)
        R += tl.dot(tl.trans(g), phi_q, input_precision=PRECISION) * over_t
        r -= tl.sum(phi_q.to(tl.float32) * (delta * over_t)[:, None], 0)
        if moments is not None:
            moment1 += tl.sum(grad_x, 0)
            moment2 += tl.sum(grad_x * offset, 0)
    if moments is not None:
        store_moments(moments, index, moment1, moment2, D, BLOCK_D)
