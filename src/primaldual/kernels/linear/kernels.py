# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Triton kernels of linear attention: one pass over keys and values, one over queries, and as many for the gradients.

With queries and keys mapped by x = (raw − shift) ⊙ scale, and weights w_j on the keys (zero hides one), the state of a
head is

    S_f = Σ_j w_j Φ_f(k_j) v_j,   z_f = Σ_j w_j Φ_f(k_j),   float32, S [F, C] followed by z [F].

With u = max_f z_f, the unit that keeps every operand in range of float16 at any length, and v̄ = Σ_f S_f / Σ_f z_f,

    out_i = v̄ + Σ_f Φ_f(q_i) M_f / h_i,   M_f = (S_f − z_f v̄)/u,   h_i = Σ_f Φ_f(q_i) z_f/u,

so that deviations from the mean are rounded, not values. Where no key is seen all of it is zero. A factor per query
cancels: Φ(q) is free of one.

The features of a tile are rounded once and used in products alone; sums over rows or features are products too, with a
matrix of a few columns: a pass is bound by memory only if it spends few instructions on each number.

Dimension 0 of the grid is the head, dimension 1 a span of `per_program` rows. Products accumulate in float32. Sums over
rows leave as one partial state per program and are added in a fixed order, without atomics. EVEN: no tile is ragged.
"""

import triton
import triton.language as tl


@triton.jit
def head(pointer, strides, H):
    """The first row of this program's head in [B, H, N, D]."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    return pointer + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load(pointer, strides, n, length, D: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """Rows n of one head, [rows, BLOCK_D], zero where there is nothing."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = pointer + n.to(tl.int64)[:, None] * strides[2] + d * strides[3]
    if EVEN and D == BLOCK_D:
        x = tl.load(at)
    else:
        x = tl.load(at, (n < length)[:, None] & (d < D), other=0.0)
    return x


@triton.jit
def store(pointer, strides, n, length, x, D: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """x to the rows n that exist."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = pointer + n.to(tl.int64)[:, None] * strides[2] + d * strides[3]
    if EVEN and D == BLOCK_D:
        tl.store(at, x.to(pointer.dtype.element_ty))
    else:
        tl.store(at, x.to(pointer.dtype.element_ty), (n < length)[:, None] & (d < D))


@triton.jit
def load_weights(weight, strides, n, length, H):
    """w_j of the keys n, zero where there is none."""
    if weight is None:
        w = (n < length).to(tl.float32)
    else:
        w = tl.load(head(weight, strides, H) + n.to(tl.int64) * strides[2], n < length, other=0.0)
    return w


@triton.jit
def load_map(shift, scale, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(shift, scale) of this head; (0, 1), which the compiler removes, where points are not mapped."""
    if shift is None:
        a, c = tl.zeros((BLOCK_D,), tl.float32), tl.full((BLOCK_D,), 1.0, tl.float32)
    else:
        d = tl.arange(0, BLOCK_D)
        at = tl.program_id(0).to(tl.int64) * D + d
        a, c = tl.load(shift + at, d < D, other=0.0), tl.load(scale + at, d < D, other=0.0)
    return a[None, :], c[None, :]


@triton.jit
def load_omega(omega, D: tl.constexpr, F: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr):
    """Ω/D^(1/4) transposed, [BLOCK_D, BLOCK_F]; zeros, which are not used, where Φ has none."""
    if omega is None:
        matrix = tl.zeros((BLOCK_D, BLOCK_F), tl.float32)
    else:
        d, f = tl.arange(0, BLOCK_D)[:, None], tl.arange(0, BLOCK_F)[None, :]
        matrix = tl.load(omega + f * D + d, (d < D) & (f < F), other=0.0)
    return matrix


@triton.jit
def load_state(state, index, F: tl.constexpr, C: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr):
    """(S [F, C], z [F]) of the state with this index."""
    f, c = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_C)
    state += index.to(tl.int64) * (F * C + F)
    S = tl.load(state + f[:, None] * C + c[None, :], (f < F)[:, None] & (c < C)[None, :], other=0.0)
    return S, tl.load(state + F * C + f, f < F, other=0.0)


@triton.jit
def store_state(state, index, S, z, F: tl.constexpr, C: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr):
    """(S [F, C], z [F]) as the state with this index."""
    f, c = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_C)
    state += index.to(tl.int64) * (F * C + F)
    tl.store(state + f[:, None] * C + c[None, :], S, (f < F)[:, None] & (c < C)[None, :])
    tl.store(state + F * C + f, z, f < F)


@triton.jit
def store_moments(moments, index, first, second, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Two sums over this program's rows, [2, D]."""
    d = tl.arange(0, BLOCK_D)
    moments += index.to(tl.int64) * (2 * D)
    tl.store(moments + d, first, d < D)
    tl.store(moments + D + d, second, d < D)


@triton.jit
def exp(x):
    """e^x in two instructions; tl.exp keeps subnormal numbers, for five."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def features(
    x, omega, dtype: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
    RANDOM: tl.constexpr, IS_QUERY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Φ(x) [rows, BLOCK_F] in float32, zero beyond F: elu(x) + 1, or exp(Ωx' − |x'|²/2)/√F with x' = x/D^(1/4).

    Of a query the factor that cancels is chosen so that its largest random feature is 1.
    """
    exists = (tl.arange(0, BLOCK_F) < F)[None, :]
    if RANDOM:
        x = x.to(dtype)
        log_phi = tl.dot(x, omega, input_precision=PRECISION)
        if F < BLOCK_F:
            log_phi = tl.where(exists, log_phi, float("-inf"))
        if IS_QUERY:
            phi = exp(log_phi - tl.max(log_phi, 1)[:, None])
        else:
            norm = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) * (0.5 / D**0.5)
            phi = exp(log_phi - norm[:, None]) * (1.0 / F**0.5)
    else:
        phi = tl.where(x > 0, x + 1, exp(x))
        if F < BLOCK_F:
            phi = tl.where(exists, phi, 0.0)
    return phi


@triton.jit
def through_features(
    x, phi, grad_phi, omega, dtype: tl.constexpr, D: tl.constexpr, RANDOM: tl.constexpr, PRECISION: tl.constexpr
):
    """∂/∂x from ∂/∂Φ(x): elu' is 1 above zero and Φ below; ∂ log Φ_f/∂x = Ω_f/D^(1/4) − x/√D."""
    if RANDOM:
        grad_log = phi * grad_phi
        grad = tl.dot(grad_log.to(dtype), tl.trans(omega), input_precision=PRECISION)
        grad -= x * (tl.sum(grad_log, 1) * (1.0 / D**0.5))[:, None]
    else:
        grad = tl.where(x > 0, grad_phi, grad_phi * phi)
    return grad


@triton.jit
def columns(x, dtype: tl.constexpr):
    """x as two of 16 columns, what it rounds to and the rest: a product with it loses nothing of float32."""
    column = tl.arange(0, 16)[None, :]
    high = x.to(dtype).to(tl.float32)
    return tl.where(column == 0, high[:, None], tl.where(column == 1, (x - high)[:, None], 0.0)).to(dtype)


@triton.jit
def inverse(x):
    """1/x, and zero for zero."""
    return tl.where(x > 0, 1.0 / tl.where(x > 0, x, 1.0), 0.0)


@triton.jit
def normalized(S, z):
    """(M [F, C], z/u, v̄ [C]) and 1/u."""
    over_unit = inverse(tl.max(z, 0))
    mean = tl.sum(S, 0) * inverse(tl.sum(z, 0))
    return (S - z[:, None] * mean[None, :]) * over_unit, z * over_unit, mean, over_unit


@triton.jit
def sum_keys(
    k, v, weight, shift, scale, omega, partial, k_strides, v_strides, weight_strides, H, length, per_program,
    EVEN: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    RANDOM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """partial = (Σ_j w_j Φ(k_j) v_jᵀ, Σ_j w_j Φ(k_j)) over the keys of this program."""
    dtype: tl.constexpr = v.dtype.element_ty
    first = tl.program_id(1) * per_program
    k, v = head(k, k_strides, H), head(v, v_strides, H)
    a, c = load_map(shift, scale, D, BLOCK_D)
    om = load_omega(omega, D, F, BLOCK_D, BLOCK_F)
    S = tl.zeros((BLOCK_F, BLOCK_C), tl.float32)
    z = tl.zeros((BLOCK_F, 16), tl.float32)
    ones = columns(tl.full((BLOCK,), 1.0, tl.float32), dtype)
    for start in tl.range(first, tl.minimum(first + per_program, length), BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        x = (load(k, k_strides, n, length, D, BLOCK_D, EVEN).to(tl.float32) - a) * c
        values = load(v, v_strides, n, length, C, BLOCK_C, EVEN)
        phi = features(x, om, dtype, D, F, BLOCK_F, RANDOM, False, PRECISION)
        if not EVEN or weight is not None:
            phi *= load_weights(weight, weight_strides, n, length, H)[:, None]
        phi = tl.trans(phi.to(dtype))
        S = tl.dot(phi, values, S, input_precision=PRECISION)
        z = tl.dot(phi, ones, z, input_precision=PRECISION)
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    store_state(partial, index, S, tl.sum(z, 1), F, C, BLOCK_F, BLOCK_C)


@triton.jit
def attend_queries(
    q, shift, scale, omega, state, out, q_strides, out_strides, H, length, per_program,
    EVEN: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    RANDOM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out_i = v̄ + Σ_f Φ_f(q_i) M_f / h_i."""
    dtype: tl.constexpr = q.dtype.element_ty
    first = tl.program_id(1) * per_program
    q, out = head(q, q_strides, H), head(out, out_strides, H)
    a, c = load_map(shift, scale, D, BLOCK_D)
    om = load_omega(omega, D, F, BLOCK_D, BLOCK_F)
    S, z = load_state(state, tl.program_id(0), F, C, BLOCK_F, BLOCK_C)
    M, z, mean, _ = normalized(S, z)
    M, z = M.to(dtype), columns(z, dtype)
    for start in tl.range(first, tl.minimum(first + per_program, length), BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        x = (load(q, q_strides, n, length, D, BLOCK_D, EVEN).to(tl.float32) - a) * c
        phi = features(x, om, dtype, D, F, BLOCK_F, RANDOM, True, PRECISION).to(dtype)
        over_h = inverse(tl.sum(tl.dot(phi, z, input_precision=PRECISION), 1))
        o = tl.dot(phi, M, input_precision=PRECISION) * over_h[:, None] + mean[None, :]
        store(out, out_strides, n, length, o, C, BLOCK_C, EVEN)


@triton.jit
def query_gradients(
    q, grad, shift, scale, omega, state, grad_q, partial, moments, q_strides, grad_strides, grad_q_strides,
    H, length, per_program,
    EVEN: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    RANDOM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With g_i = ∂/∂out_i, G_if = g_i·M_f and δ_i = Σ_f Φ_f(q_i) G_if/h_i:

    ∂/∂Φ_f(q_i) = (G_if − δ_i z_f/u)/h_i,   partial = (Σ_i Φ(q_i) g_iᵀ/h_i, Σ_i Φ(q_i) δ_i/h_i).

    moments = (Σ_i ∂x_i, Σ_i ∂x_i ⊙ (q_i − shift)), from which the gradients of shift and scale follow.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    first = tl.program_id(1) * per_program
    q, grad, grad_q = head(q, q_strides, H), head(grad, grad_strides, H), head(grad_q, grad_q_strides, H)
    a, c = load_map(shift, scale, D, BLOCK_D)
    om = load_omega(omega, D, F, BLOCK_D, BLOCK_F)
    S, z = load_state(state, tl.program_id(0), F, C, BLOCK_F, BLOCK_C)
    M, z, _, _ = normalized(S, z)
    M = tl.trans(M.to(dtype))
    grad_S = tl.zeros((BLOCK_C, BLOCK_F), tl.float32)
    grad_z = tl.zeros((BLOCK, BLOCK_F), tl.float32)
    moment1, moment2 = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(first, tl.minimum(first + per_program, length), BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        offset = load(q, q_strides, n, length, D, BLOCK_D, EVEN).to(tl.float32) - a
        g = load(grad, grad_strides, n, length, C, BLOCK_C, EVEN)
        x = offset * c
        phi = features(x, om, dtype, D, F, BLOCK_F, RANDOM, True, PRECISION)
        over_h = inverse(tl.sum(phi * z[None, :], 1))
        G = tl.dot(g, M, input_precision=PRECISION)
        delta = tl.sum(phi * G, 1) * over_h
        grad_phi = (G - delta[:, None] * z[None, :]) * over_h[:, None]
        grad_x = through_features(x, phi, grad_phi, om, dtype, D, RANDOM, PRECISION)
        store(grad_q, grad_q_strides, n, length, grad_x * c, D, BLOCK_D, EVEN)
        g = (g * over_h[:, None]).to(dtype)
        grad_S = tl.dot(tl.trans(g), phi.to(dtype), grad_S, input_precision=PRECISION)
        grad_z += phi * (delta * over_h)[:, None]
        if moments is not None:
            moment1 += tl.sum(grad_x, 0)
            moment2 += tl.sum(grad_x * offset, 0)
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    store_state(partial, index, tl.trans(grad_S), tl.sum(grad_z, 0), F, C, BLOCK_F, BLOCK_C)
    if moments is not None:
        store_moments(moments, index, moment1, moment2, D, BLOCK_D)


@triton.jit
def key_gradients(
    k, v, weight, shift, scale, omega, state, grad_state, grad_k, grad_v, grad_weight, moments,
    k_strides, v_strides, weight_strides, grad_k_strides, grad_v_strides, H, length, per_program,
    EVEN: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
    RANDOM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With A = Σ_i Φ(q_i) g_iᵀ/(u h_i) and b = −Σ_i Φ(q_i) (δ_i + g_i·v̄)/(u h_i), the gradients of S and z:

    ∂/∂v_j = Σ_f w_j Φ_f(k_j) A_f,   ∂/∂(w_j Φ_f(k_j)) = A_f·v_j + b_f;   moments as for the queries.
    """
    dtype: tl.constexpr = v.dtype.element_ty
    first = tl.program_id(1) * per_program
    k, grad_k = head(k, k_strides, H), head(grad_k, grad_k_strides, H)
    v, grad_v = head(v, v_strides, H), head(grad_v, grad_v_strides, H)
    a, c = load_map(shift, scale, D, BLOCK_D)
    om = load_omega(omega, D, F, BLOCK_D, BLOCK_F)
    S, z = load_state(state, tl.program_id(0), F, C, BLOCK_F, BLOCK_C)
    _, _, mean, over_unit = normalized(S, z)
    A, b = load_state(grad_state, tl.program_id(0), F, C, BLOCK_F, BLOCK_C)
    A = (A * over_unit).to(dtype)
    b = -b * over_unit - tl.sum(A.to(tl.float32) * mean[None, :], 1)
    moment1, moment2 = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(first, tl.minimum(first + per_program, length), BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        offset = load(k, k_strides, n, length, D, BLOCK_D, EVEN).to(tl.float32) - a
        values = load(v, v_strides, n, length, C, BLOCK_C, EVEN)
        x = offset * c
        phi = features(x, om, dtype, D, F, BLOCK_F, RANDOM, False, PRECISION)
        grad_phi = tl.dot(values, tl.trans(A), input_precision=PRECISION) + b[None, :]
        weighted = phi
        if not EVEN or weight is not None:
            w = load_weights(weight, weight_strides, n, length, H)
            if weight is not None:
                at = grad_weight + tl.program_id(0).to(tl.int64) * length + n
                tl.store(at, tl.sum(phi * grad_phi, 1), n < length)
            weighted = phi * w[:, None]
            grad_phi = grad_phi * w[:, None]
        grad_values = tl.dot(weighted.to(dtype), A, input_precision=PRECISION)
        store(grad_v, grad_v_strides, n, length, grad_values, C, BLOCK_C, EVEN)
        grad_x = through_features(x, phi, grad_phi, om, dtype, D, RANDOM, PRECISION)
        store(grad_k, grad_k_strides, n, length, grad_x * c, D, BLOCK_D, EVEN)
        if moments is not None:
            moment1 += tl.sum(grad_x, 0)
            moment2 += tl.sum(grad_x * offset, 0)
    if moments is not None:
        index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        store_moments(moments, index, moment1, moment2, D, BLOCK_D)
