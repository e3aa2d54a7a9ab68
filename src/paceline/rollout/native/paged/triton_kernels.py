"""Triton kernels of a decoding round: rotate and store, attention over pages, sampling. Sums are float32.

Pages are [N, S, K, D], contiguous; the launchers in `triton_ops.py` assert that. Page offsets are 64-bit.
"""

import triton
import triton.language as tl


@triton.jit
def rotate_store_kernel(
    qkv_ptr, query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr, table_ptr, positions_ptr,
    query_ptr, keys_ptr, values_ptr, table_width, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, VALUE_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    head = tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, half)[None, :]
    inside = head < H + K
    at = row * (H + 2 * K) * D + head * D + col
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
    cos_1 = tl.load(cos_ptr + row * D + col).to(tl.float32)
    cos_2 = tl.load(cos_ptr + row * D + col + half).to(tl.float32)
    sin_1 = tl.load(sin_ptr + row * D + col).to(tl.float32)
    sin_2 = tl.load(sin_ptr + row * D + col + half).to(tl.float32)
    out_1 = (first * cos_1 - second * sin_1).to(kind)
    out_2 = (second * cos_2 + first * sin_2).to(kind)
    to_query = row * H * D + head * D + col
    tl.store(query_ptr + to_query, out_1, head < H)
    tl.store(query_ptr + to_query + half, out_2, head < H)
    position = tl.load(positions_ptr + row)
    page = tl.load(table_ptr + row * table_width + position // PAGE).to(tl.int64)
    place = (page * PAGE + position % PAGE) * K * D
    is_key = (head >= H) & inside
    to_key = place + (head - H) * D + col
    tl.store(keys_ptr + to_key, out_1, is_key)
    tl.store(keys_ptr + to_key + half, out_2, is_key)
    value_col = tl.arange(0, VALUE_COLS)
    in_value = value_col < K * D
    value = tl.load(qkv_ptr + row * (H + 2 * K) * D + (H + K) * D + value_col, in_value, other=0.0)
    tl.store(values_ptr + place + value_col, value, in_value)


@triton.jit
def decode_kernel(
    query_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, out_ptr, lse_ptr, table_width, scale, softcap,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = H // K
    member = tl.arange(0, GROUP)[:, None]
    col = tl.arange(0, D)
    is_head = member < group
    to_head = kv_head * group + member
    query = tl.load(query_ptr + row * H * D + to_head * D + col[None, :], is_head, other=0.0)
    length = tl.load(lengths_ptr + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    blocks = tl.cdiv(length - first, BLOCK)
    per_split = tl.cdiv(blocks, SPLITS)
    start = first + split * per_split * BLOCK
    end = tl.minimum(start + per_split * BLOCK, length)
    highest = tl.full([GROUP, 1], -float("inf"), tl.float32)
    mass = tl.zeros([GROUP, 1], tl.float32)
    total = tl.zeros([GROUP, D], tl.float32)
    token = tl.arange(0, BLOCK)
    for at in range(start, end, BLOCK):
        page = tl.load(table_ptr + row * table_width + at // PAGE).to(tl.int64)
        place = (page * PAGE + at % PAGE + token).to(tl.int64) * K * D + kv_head * D
        position = at + token
        seen = position < length
        if WINDOW > 0:
            seen = seen & (position >= length - WINDOW)
        key = tl.load(keys_ptr + place[None, :] + col[:, None])
        value = tl.load(values_ptr + place[:, None] + col[None, :])
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1)[:, None])
        # a block of a window may hide all its tokens from the query
        base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        shrink = tl.exp(highest - base)
        weight = tl.exp(scores - base)
        mass = mass * shrink + tl.sum(weight, axis=1)[:, None]
        total = total * shrink + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = new_highest
    kind = out_ptr.dtype.element_ty
    out = tl.where(mass > 0.0, total / mass, 0.0)
    to_out = ((row * SPLITS + split) * H + to_head) * D + col[None, :]
    tl.store(out_ptr + to_out, out.to(kind), is_head)
    if SPLITS > 1:
        lse = tl.where(mass > 0.0, highest + tl.log(mass), -float("inf"))
        tl.store(lse_ptr + (row * SPLITS + split) * H + to_head, lse, is_head)


@triton.jit
def merge_kernel(
    parts_ptr, lse_ptr, out_ptr, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SLOTS)
    is_split = split < SPLITS
    col = tl.arange(0, D)
    lse = tl.load(lse_ptr + (row * SPLITS + split) * H + head, is_split, other=-float("inf"))
    weight = tl.exp(lse - tl.max(lse, axis=0))
    at = ((row * SPLITS + split) * H + head) * D
    parts = tl.load(parts_ptr + at[:, None] + col[None, :], is_split[:, None], other=0.0)
    out = tl.sum(parts * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out_ptr + (row * H + head) * D + col, out.to(out_ptr.dtype.element_ty))


@triton.jit
def _scaled(logits_ptr, at, inside, temperature, softcap, HAS_SOFTCAP: tl.constexpr):
    """Logits over temperature (1 where it is 0: greedy rows report log-probs at temperature 1)."""
    z = tl.load(logits_ptr + at, inside, other=-float("inf")).to(tl.float32)
    if HAS_SOFTCAP:
        z = tl.where(inside, softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0), z)
    return z / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def block_mass_kernel(
    logits_ptr, temperatures_ptr, highest_ptr, mass_ptr, num_cols, num_blocks, softcap,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    inside = cols < num_cols
    temperature = tl.load(temperatures_ptr + row)
    z = _scaled(logits_ptr, row * num_cols + cols, inside, temperature, softcap, HAS_SOFTCAP)
    highest = tl.max(z, axis=0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(highest_ptr + row * num_blocks + block, highest)
    tl.store(mass_ptr + row * num_blocks + block, tl.sum(tl.exp(z - base), axis=0))


@triton.jit
def pick_kernel(
    logits_ptr, temperatures_ptr, highest_ptr, mass_ptr, seeds_ptr, counts_ptr, slots_ptr,
    tokens_ptr, logprobs_ptr, last_tokens_ptr, num_cols, num_blocks, softcap,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks
    highest = tl.load(highest_ptr + row * num_blocks + blocks, is_block, other=-float("inf"))
    top = tl.max(highest, axis=0)
    mass = tl.load(mass_ptr + row * num_blocks + blocks, is_block, other=0.0) * tl.exp(highest - top)
    mass = tl.where(is_block, mass, 0.0)
    total = tl.sum(mass, axis=0)
    # SplitMix64 (Steele, Lea, Flood 2014), counter-based; the same numbers as sampling.py
    state = tl.load(seeds_ptr + row).to(tl.uint64, bitcast=True)
    count = tl.load(counts_ptr + row).to(tl.uint64, bitcast=True)
    one = count - count + 1
    state = state + (count + one) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    number = ((state >> 11).to(tl.float64) * 1.1102230246251565e-16).to(tl.float32)
    threshold = number * total
    through = tl.cumsum(mass, axis=0)
    last_block = tl.max(tl.where(mass > 0.0, blocks, 0), axis=0)
    block = tl.minimum(tl.sum((is_block & (through <= threshold)).to(tl.int32), axis=0), last_block)
    top_block = tl.min(tl.where(is_block & (highest == top), blocks, BLOCKS), axis=0)
    # the vocabulary's, even where NaNs leave no block that is highest
    block = tl.minimum(tl.where(temperature > 0.0, block, top_block), last_block)
    before = tl.sum(tl.where(blocks < block, mass, 0.0), axis=0)
    offset = tl.arange(0, BLOCK)
    cols = block * BLOCK + offset
    inside = cols < num_cols
    z = _scaled(logits_ptr, row * num_cols + cols, inside, temperature, softcap, HAS_SOFTCAP)
    p = tl.exp(z - top)
    passed = before + tl.cumsum(p, axis=0) <= threshold
    last = tl.max(tl.where(p > 0.0, offset, 0), axis=0)
    drawn = tl.sum((inside & passed).to(tl.int32), axis=0)
    # this block's own highest: `top` comes from another kernel, which may have rounded otherwise
    highest_at = tl.min(tl.where(inside & (z == tl.max(z, axis=0)), offset, BLOCK), axis=0)
    drawn = tl.minimum(tl.where(temperature > 0.0, drawn, highest_at), last)
    token = (block * BLOCK + drawn).to(tl.int64)
    z_token = tl.sum(tl.where(offset == drawn, z, 0.0), axis=0)
    tl.store(tokens_ptr + row, token)
    tl.store(logprobs_ptr + row, z_token - top - tl.log(total))
    tl.store(last_tokens_ptr + tl.load(slots_ptr + row), token)
