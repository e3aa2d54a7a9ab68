"""Triton kernels of the fused layer and head. One program reads each of its rows once; sums are float32.

Rows may be many and wide: row offsets are 64-bit. Pointers are to contiguous tensors; the launchers in
`triton_ops.py` and `triton_head.py` assert that.
"""

import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(
    x_ptr, added_ptr, weight_ptr, total_ptr, normed_ptr, rstd_ptr, num_cols, eps,
    HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < num_cols
    at = row * num_cols + cols
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += tl.load(added_ptr + at, inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, inside)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / num_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + cols, inside, other=0.0).to(tl.float32)
    unit = (x * rstd).to(normed_ptr.dtype.element_ty).to(tl.float32)
    tl.store(normed_ptr + at, (unit * weight).to(normed_ptr.dtype.element_ty), inside)


@triton.jit
def rms_norm_backward_kernel(
    grad_ptr, x_ptr, rstd_ptr, weight_ptr, residual_ptr, out_ptr, normed_ptr, partial_ptr, num_rows, num_cols,
    WITH_NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < num_cols
    weight = tl.load(weight_ptr + cols, inside, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        at = (row + tl.zeros([BLOCK], dtype=tl.int64)) * num_cols + cols
        grad = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + at, inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        unit = x * rstd
        weighted = grad * weight
        mean = tl.sum(weighted * unit, axis=0) / num_cols
        out = rstd * (weighted - unit * mean) + residual
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)
        weight_grad += grad * unit
        if WITH_NORMED:
            kind = normed_ptr.dtype.element_ty
            tl.store(normed_ptr + at, (unit.to(kind).to(tl.float32) * weight).to(kind), inside)
    tl.store(partial_ptr + program.to(tl.int64) * num_cols + cols, weight_grad, inside)


@triton.jit
def rotate_kernel(
    qkv_ptr, query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr, query_ptr, key_ptr, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    head = tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, half)[None, :]
    inside = head < H + K
    at = token * (H + 2 * K) * D + head * D + col
    first = tl.load(qkv_ptr + at, inside, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + at + half, inside, other=0.0).to(tl.float32)
    kind = query_ptr.dtype.element_ty
    if HAS_NORM:
        rstd = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D + eps)[:, None]
        is_query = head < H
        weight_1 = tl.where(is_query, tl.load(query_weight_ptr + col), tl.load(key_weight_ptr + col)).to(
            tl.float32
        )
        weight_2 = tl.where(
            is_query, tl.load(query_weight_ptr + col + half), tl.load(key_weight_ptr + col + half)
        ).to(tl.float32)
        first = ((first * rstd).to(kind).to(tl.float32) * weight_1).to(kind).to(tl.float32)
        second = ((second * rstd).to(kind).to(tl.float32) * weight_2).to(kind).to(tl.float32)
    cos_1 = tl.load(cos_ptr + token * D + col).to(tl.float32)
    cos_2 = tl.load(cos_ptr + token * D + col + half).to(tl.float32)
    sin_1 = tl.load(sin_ptr + token * D + col).to(tl.float32)
    sin_2 = tl.load(sin_ptr + token * D + col + half).to(tl.float32)
    out_1 = (first * cos_1 - second * sin_1).to(kind)
    out_2 = (second * cos_2 + first * sin_2).to(kind)
    to_query = token * H * D + head * D + col
    tl.store(query_ptr + to_query, out_1, head < H)
    tl.store(query_ptr + to_query + half, out_2, head < H)
    is_key = (head >= H) & inside
    to_key = token * K * D + (head - H) * D + col
    tl.store(key_ptr + to_key, out_1, is_key)
    tl.store(key_ptr + to_key + half, out_2, is_key)


@triton.jit
def rotate_backward_kernel(
    grad_query_ptr, grad_key_ptr, grad_value_ptr, qkv_ptr, query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr,
    out_ptr, partial_ptr, num_tokens, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr,
    VALUE_COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    half: tl.constexpr = D // 2
    head = tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, half)[None, :]
    inside = head < H + K
    is_query = head < H
    is_key = (head >= H) & inside
    if HAS_NORM:
        weight_1 = tl.where(is_query, tl.load(query_weight_ptr + col), tl.load(key_weight_ptr + col)).to(
            tl.float32
        )
        weight_2 = tl.where(
            is_query, tl.load(query_weight_ptr + col + half), tl.load(key_weight_ptr + col + half)
        ).to(tl.float32)
        weight_grad_1 = tl.zeros([HEADS, half], dtype=tl.float32)
        weight_grad_2 = tl.zeros([HEADS, half], dtype=tl.float32)
    for index in range(program, num_tokens, tl.num_programs(0)):
        token = index + tl.zeros([1, 1], dtype=tl.int64)
        from_query = token * H * D + head * D + col
        from_key = token * K * D + (head - H) * D + col
        grad_1 = tl.load(grad_query_ptr + from_query, is_query, other=0.0).to(tl.float32)
        grad_1 += tl.load(grad_key_ptr + from_key, is_key, other=0.0).to(tl.float32)
        grad_2 = tl.load(grad_query_ptr + from_query + half, is_query, other=0.0).to(tl.float32)
        grad_2 += tl.load(grad_key_ptr + from_key + half, is_key, other=0.0).to(tl.float32)
        cos_1 = tl.load(cos_ptr + token * D + col).to(tl.float32)
        cos_2 = tl.load(cos_ptr + token * D + col + half).to(tl.float32)
        sin_1 = tl.load(sin_ptr + token * D + col).to(tl.float32)
        sin_2 = tl.load(sin_ptr + token * D + col + half).to(tl.float32)
        turned_1 = grad_1 * cos_1 + grad_2 * sin_2
        turned_2 = grad_2 * cos_2 - grad_1 * sin_1
        at = token * (H + 2 * K) * D + head * D + col
        if HAS_NORM:
            x_1 = tl.load(qkv_ptr + at, inside, other=0.0).to(tl.float32)
            x_2 = tl.load(qkv_ptr + at + half, inside, other=0.0).to(tl.float32)
            rstd = tl.rsqrt((tl.sum(x_1 * x_1, axis=1) + tl.sum(x_2 * x_2, axis=1)) / D + eps)[:, None]
            unit_1 = x_1 * rstd
            unit_2 = x_2 * rstd
            weight_grad_1 += turned_1 * unit_1
            weight_grad_2 += turned_2 * unit_2
            turned_1 *= weight_1
            turned_2 *= weight_2
            mean = ((tl.sum(turned_1 * unit_1, axis=1) + tl.sum(turned_2 * unit_2, axis=1)) / D)[:, None]
            turned_1 = rstd * (turned_1 - unit_1 * mean)
            turned_2 = rstd * (turned_2 - unit_2 * mean)
        tl.store(out_ptr + at, turned_1.to(out_ptr.dtype.element_ty), inside)
        tl.store(out_ptr + at + half, turned_2.to(out_ptr.dtype.element_ty), inside)
        value_col = tl.arange(0, VALUE_COLS)
        in_value = value_col < K * D
        row = index + tl.zeros([VALUE_COLS], dtype=tl.int64)
        value = tl.load(grad_value_ptr + row * K * D + value_col, in_value, other=0.0)
        tl.store(out_ptr + row * (H + 2 * K) * D + (H + K) * D + value_col, value, in_value)
    if HAS_NORM:
        to = partial_ptr + program.to(tl.int64) * 2 * D + tl.arange(0, half)
        tl.store(to, tl.sum(tl.where(is_query, weight_grad_1, 0.0), axis=0))
        tl.store(to + half, tl.sum(tl.where(is_query, weight_grad_2, 0.0), axis=0))
        tl.store(to + D, tl.sum(tl.where(is_key, weight_grad_1, 0.0), axis=0))
        tl.store(to + D + half, tl.sum(tl.where(is_key, weight_grad_2, 0.0), axis=0))


@triton.jit
def gate_kernel(gate_up_ptr, out_ptr, num_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < num_cols
    at = gate_up_ptr + row * 2 * num_cols + cols
    gate = tl.load(at, inside, other=0.0).to(tl.float32)
    up = tl.load(at + num_cols, inside, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * num_cols + cols, gated.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def gate_backward_kernel(
    grad_ptr, gate_up_ptr, out_ptr, gated_ptr, num_cols, WITH_GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < num_cols
    at = row * 2 * num_cols + cols
    gate = tl.load(gate_up_ptr + at, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + num_cols, inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * num_cols + cols, inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (grad * up * slope).to(kind), inside)
    tl.store(out_ptr + at + num_cols, (grad * silu).to(kind), inside)
    if WITH_GATED:
        tl.store(gated_ptr + row * num_cols + cols, (silu * up).to(kind), inside)


@triton.jit
def logit_statistics_kernel(
    logits_ptr,
    targets_ptr,
    logprob_ptr,
    entropy_ptr,
    norm_ptr,
    num_cols,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    highest = -float("inf")
    mass = 0.0  # sum of exp(z - highest)
    moment = 0.0  # sum of exp(z - highest) * (z - highest): stays exact where one token has all the mass
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < num_cols
        z = tl.load(logits_ptr + row * num_cols + cols, inside, other=-float("inf")).to(tl.float32)
        z = z * inverse_temperature
        new_highest = tl.maximum(highest, tl.max(z, axis=0))
        shift = highest - new_highest
        scale = tl.exp(shift)
        distance = z - new_highest
        weight = tl.exp(distance)
        old_moment = tl.where(mass > 0.0, scale * (moment + mass * shift), 0.0)
        moment = old_moment + tl.sum(tl.where(inside, weight * distance, 0.0), axis=0)
        mass = mass * scale + tl.sum(weight, axis=0)
        highest = new_highest
    log_mass = tl.log(mass)
    target = tl.load(targets_ptr + row)
    z_target = tl.load(logits_ptr + row * num_cols + target).to(tl.float32) * inverse_temperature
    tl.store(logprob_ptr + row, z_target - highest - log_mass)
    tl.store(entropy_ptr + row, log_mass - moment / mass)
    tl.store(norm_ptr + row, highest + log_mass)


@triton.jit
def logit_gradient_kernel(
    logits_ptr, targets_ptr, logprob_ptr, entropy_ptr, norm_ptr, grad_logprob_ptr, grad_entropy_ptr, num_cols,
    inverse_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < num_cols
    at = row * num_cols + cols
    norm = tl.load(norm_ptr + row)
    grad_logprob = tl.load(grad_logprob_ptr + row)
    target = tl.load(targets_ptr + row)
    log_p = tl.load(logits_ptr + at, inside, other=0.0).to(tl.float32) * inverse_temperature - norm
    p = tl.exp(log_p)
    grad = -grad_logprob * p
    # 1 - p cancels where p is near 1: there its series in the target's log-prob
    logprob = tl.load(logprob_ptr + row)
    series = -logprob * (1.0 + logprob * (0.5 + logprob * (1.0 / 6.0)))
    own = tl.where(logprob > -0.05, series, 1.0 - tl.exp(logprob))
    grad = tl.where(cols == target, grad_logprob * own, grad)
    if WITH_ENTROPY:
        grad -= tl.load(grad_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    tl.store(logits_ptr + at, (grad * inverse_temperature).to(logits_ptr.dtype.element_ty), inside)


@triton.jit
def scale_kernel(in_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(in_ptr + at, inside, other=0.0).to(tl.float32) * tl.load(scale_ptr).to(tl.float32)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), inside)
