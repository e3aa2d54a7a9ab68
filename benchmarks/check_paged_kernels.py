"""Kernels of a decoding round against their references, on small inputs; one line each, exit code 1 where one is wrong.

usage: python benchmarks/check_paged_kernels.py           on a CUDA device
       TRITON_INTERPRET=1 python benchmarks/check_paged_kernels.py --device cpu   without one, interpreted
"""

import argparse
import sys

import numpy as np
import torch

from paceline.model.attention import AttentionArgs
from paceline.model.fused.elementwise import HeadLayout
from paceline.model.fused.reference import ReferenceElementwise
from paceline.rollout.native.paged import triton_ops
from paceline.rollout.native.paged.attention import GatheringAttention, LayerPages
from paceline.rollout.native.paged.batches import ChunkRows, DecodeBatch, DrawRows, PrefillBatch
from paceline.rollout.native.paged.device import (
    DeviceRows,
    block_size,
    draw_tokens,
    fill_block,
    uniform_numbers_on_device,
)
from paceline.rollout.native.paged.kernels import round_kernels
from paceline.rollout.native.paged.runner import prefill_chunks
from paceline.rollout.native.sampling import uniform_numbers


def make_rows(lengths, page_tokens, device, temperatures=None, num_slots=64):
    """A batch of these lengths on shuffled pages, two rows more than it has samples."""
    rng = np.random.default_rng(0)
    used, num_rows = len(lengths), len(lengths) + 2
    width = -(-max(lengths) // page_tokens) + 1
    pages = rng.permutation(np.arange(1, used * width + 1)).reshape(used, width).astype(np.int32)
    draw = DrawRows(
        rng.permutation(num_slots)[:used].astype(np.int64),
        rng.integers(0, 2**64, used, dtype=np.uint64),
        rng.integers(0, 1000, used),
        np.asarray(temperatures or [1.0] * used, dtype=np.float64),
    )
    batch = DecodeBatch(draw, np.asarray(lengths) - 1, pages)
    block = torch.empty(block_size(num_rows, width), dtype=torch.int64)
    fill_block(block, batch, num_rows, width, num_slots)
    return batch, DeviceRows.of_block(block.to(device), num_rows, width), used * width + 1


def error(found, expected):
    """Relative error in the norm; infinite where there are NaNs."""
    found, expected = found.float(), expected.float()
    value = float((found - expected).norm() / expected.norm())
    return value if value == value else float("inf")


def check_decode(device, dtype):
    """Attention over pages: grouped heads, windows, soft caps, one and several splits."""
    for heads, kv_heads, window, softcap, programs in (
        (4, 2, None, None, 1),
        (4, 2, None, None, 400),
        (6, 1, 20, None, 400),
        (4, 4, None, 5.0, 1),
    ):
        torch.manual_seed(0)
        _, rows, num_pages = make_rows([1, 37, 90, 150, 16], 16, device)
        size = (num_pages, 16, kv_heads, 32)
        cache = LayerPages(*(torch.randn(2, *size, device=device, dtype=dtype)))
        query = torch.randn(7, heads, 32, device=device, dtype=dtype)
        args = AttentionArgs(0, 0.2, window, softcap)
        found = triton_ops.TritonDecode(programs)(query, cache, rows.decode_rows(16), args)
        expected = GatheringAttention().decode(query, cache, rows.decode_rows(16), args)
        yield f"decode {heads}/{kv_heads} window {window} cap {softcap}", error(found[:5], expected[:5])


def check_rotate(device, dtype):
    """Queries, and keys and values in their pages, with and without norms."""
    for with_norm in (True, False):
        torch.manual_seed(0)
        _, rows, num_pages = make_rows([1, 37, 90, 16], 16, device)
        layout = HeadLayout(4, 2, 32, 1e-6)
        qkv = torch.randn(6, layout.num_columns, device=device, dtype=dtype)
        weights = torch.randn(2, 32, device=device, dtype=dtype).unbind() if with_norm else (None, None)
        cos, sin = torch.randn(2, 6, 32, device=device, dtype=dtype).unbind()
        pages = LayerPages(*torch.zeros(2, num_pages, 16, 2, 32, device=device, dtype=dtype))
        found = triton_ops.rotate_and_store(qkv, *weights, cos, sin, layout, pages, rows)
        query, key = ReferenceElementwise().rotate(qkv, *weights, cos, sin, layout)
        page = rows.page_table_RP.gather(1, rows.positions_R[:, None] // 16).squeeze(1).long()
        place = rows.positions_R % 16
        yield f"rotate norm {with_norm}", error(found, query)
        yield "  keys in pages", error(pages.keys[page, place][:4], key[:4])
        value = qkv[:, 6 * 32 :].unflatten(1, (2, 32))
        yield "  values in pages", error(pages.values[page, place][:4], value[:4])


def check_draw(device, dtype):
    """Tokens of the same numbers, greedy rows among them; log-probs."""
    for softcap in (None, 5.0):
        torch.manual_seed(0)
        temperatures = [1.0, 0.7, 0.0, 1.3, 0.0, 1.0]
        batch, rows, _ = make_rows([9] * 6, 16, device, temperatures)
        logits = (torch.randn(8, 9001, device=device) * 3).to(dtype)
        last = torch.zeros(65, dtype=torch.int64, device=device)
        tokens, logprobs = triton_ops.draw_tokens(logits, rows, last, softcap)
        reference, reference_logprobs = draw_tokens(logits, rows, last.clone(), softcap)
        yield f"draw cap {softcap}: numbers beside their token", beside(tokens, logits, rows, softcap)
        is_same = tokens == reference
        yield "  more than one token that differs", float((~is_same).sum() > 1)
        yield "  log-probs", error(logprobs[is_same], reference_logprobs[is_same])
        yield "  last tokens", float((last[rows.slots_R[:6]] != tokens[:6]).sum())
        assert len(uniform_numbers(batch.draw.seeds_R.tolist(), batch.draw.counts_R.tolist())) == 6


def beside(tokens, logits, rows, softcap):
    """How far a row's number lies outside its token's share of the distribution, at most, in float64; of greedy rows 1
    where the token is not the first of the likeliest. Sums in float32 round to either side of a boundary, so
    that tokens themselves cannot be compared."""
    logits = logits.double()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    is_greedy = rows.temperatures_R == 0.0
    shares = (logits / torch.where(is_greedy, 1.0, rows.temperatures_R.double())[:, None]).softmax(-1)
    ends = shares.cumsum(-1).gather(-1, tokens[:, None]).squeeze(-1)
    starts = ends - shares.gather(-1, tokens[:, None]).squeeze(-1)
    numbers = uniform_numbers_on_device(rows.seeds_R, rows.counts_R)
    outside = torch.maximum(starts - numbers, numbers - ends).clamp(min=0.0)
    is_wrong = (tokens != logits.argmax(-1)).double()
    return float(torch.where(is_greedy, is_wrong, outside).max())


def check_round(device, dtype):
    """The attention that a device's rounds get, on pages and heads of real models: the library's kernels too."""
    yield from _check_round(device, dtype, ((16, 8, 128, None), (32, 8, 128, None)))


def check_other_rounds(device, dtype):
    """The same with windows and with groups that no tile is a multiple of; kernels that the benchmark does not use."""
    yield from _check_round(device, dtype, ((32, 8, 128, 200), (14, 2, 64, None), (8, 4, 256, None)))


def _check_round(device, dtype, shapes):
    for heads, kv_heads, head_dim, window in shapes:
        torch.manual_seed(0)
        kernels = round_kernels(device, head_dim)
        size, plain = kernels.page_tokens, GatheringAttention()
        args = AttentionArgs(0, head_dim**-0.5, window, None)
        lengths = [1, 37, size, size + 1, 3 * size - 1, 2, 300, 129] * 4
        for used in (8, 32):
            _, rows, num_pages = make_rows(lengths[:used], size, device)
            cache = LayerPages(
                *torch.randn(2, num_pages, size, kv_heads, head_dim, device=device, dtype=dtype)
            )
            query = torch.randn(used + 2, heads, head_dim, device=device, dtype=dtype)
            decode_rows = rows.decode_rows(size)
            found = kernels.attention.decode(query, cache, decode_rows, args)
            expected = plain.decode(query, cache, decode_rows, args)
            yield f"{used} rows {heads}/{kv_heads}/{head_dim} window {window}", error(found, expected)
        spans = ((0, 5), (0, 300), (size, 140), (2 * size + 3, 1))
        pages = iter(range(1, num_pages))
        chunks = tuple(
            ChunkRows(start, length, tuple(next(pages) for _ in range(-(-(start + length) // size))))
            for start, length in spans
        )
        ints = np.zeros(0, dtype=np.int64)
        draw = DrawRows(ints, ints.astype(np.uint64), ints, ints.astype(np.float64))
        batch = prefill_chunks(PrefillBatch(ints, chunks, ints, draw), device)
        query = torch.randn(sum(length for _, length in spans), heads, head_dim, device=device, dtype=dtype)
        found = kernels.attention.prefill(query, cache, batch, args)
        yield f"  prefill ({kernels.attention.name})", error(found, plain.prefill(query, cache, batch, args))


MEASURED = (check_decode, check_rotate, check_draw, check_round)
"""What the rollout benchmark relies on, and checks before it measures."""
CHECKS = (*MEASURED, check_other_rounds)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error that is rounding, by dtype."""


def main() -> int:
    """Prints every error beside its name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    wrong = 0
    dtypes = (torch.float32,) if device.type == "cpu" else tuple(LIMITS)
    for dtype in dtypes:
        for check in CHECKS:
            for name, value in check(device, dtype):
                print(f"{dtype} {name}: {value:.2e}{'' if value <= LIMITS[dtype] else '  WRONG'}", flush=True)
                wrong += value > LIMITS[dtype]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
