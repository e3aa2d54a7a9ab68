"""Decoding attention over pages: what each kernel makes of the memory's bandwidth at the batch of `uniform`.

usage: python benchmarks/decode_attention.py [--json]           on a CUDA device
       TRITON_INTERPRET=1 python benchmarks/decode_attention.py --device cpu    without one: errors only, a small batch

256 samples, 16 query and 8 key-value heads of 128 (Qwen3 0.6B and 1.7B), pages of 128 tokens in random order, contexts
of 512 and 1,024. Kernels: FlashAttention 4 as a round calls it and with other tiles, `TritonDecode` with other tiles,
and a candidate that reads whole tiles through the bulk copy engine from pages with the heads outermost. Each is
captured over eight layers' caches, so that none lies in the L2 cache, and compared with the first.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.model.attention import AttentionArgs
from paceline.model.flash_kernels import FlashAttention4, kernel_for
from paceline.rollout.native.paged.attention import DecodeRows, GatheringAttention, LayerPages
from paceline.rollout.native.paged.triton_ops import DecodeTile, TritonDecode
from paceline.telemetry.environment import package_versions

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 8, 128, 128
ARGS = AttentionArgs(0, HEAD_DIM**-0.5, None, None)
TILES = [
    DecodeTile(block, 4, stages) for block in (32, 64, 128) for stages in (2, 3, 4) if block * stages <= 384
]
TILES += [DecodeTile(64, 8, 3), DecodeTile(64, 2, 3), DecodeTile(32, 2, 4), DecodeTile(32, 1, 4)]
FLASH_TILES: dict[str, dict[str, Any]] = {
    "": {},
    " 64 x 128": {"tile_mn": (64, 128), "num_threads": 256},
    " 64 x 128, weights in shared memory": {"tile_mn": (64, 128), "num_threads": 256, "mma_pv_is_rs": False},
    " without overlap of groups": {"intra_wg_overlap": False},
}


@triton.jit
def head_major_kernel(
    query_ptr, keys, values, table_ptr, lengths_ptr, out_ptr, table_width, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`decode_kernel` without splits, windows and soft caps, on descriptors of pages [N * K * PAGE, D]."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    group: tl.constexpr = H // K
    member = tl.arange(0, GROUP)[:, None]
    col = tl.arange(0, D)[None, :]
    to_head = row * H * D + (kv_head * group + member) * D + col
    query = tl.load(query_ptr + to_head, member < group, other=0.0)
    length = tl.load(lengths_ptr + row)
    highest = tl.full([GROUP, 1], -float("inf"), tl.float32)
    mass = tl.zeros([GROUP, 1], tl.float32)
    total = tl.zeros([GROUP, D], tl.float32)
    for at in range(0, length, BLOCK):
        page = tl.load(table_ptr + row * table_width + at // PAGE)
        start = (page * K + kv_head) * PAGE + at % PAGE
        key = keys.load([start, 0])
        value = values.load([start, 0])
        scores = tl.dot(query, key.T) * scale
        scores = tl.where((at + tl.arange(0, BLOCK) < length)[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1)[:, None])
        shrink = tl.exp(highest - new_highest)
        weight = tl.exp(scores - new_highest)
        mass = mass * shrink + tl.sum(weight, axis=1)[:, None]
        total = total * shrink + tl.dot(weight.to(value.dtype), value)
        highest = new_highest
    tl.store(out_ptr + to_head, (total / mass).to(out_ptr.dtype.element_ty), member < group)


@dataclass(frozen=True, slots=True)
class Batch:
    """One query per sample, its pages, and the caches of several layers."""

    query_RHD: Tensor
    layers: list[LayerPages]
    rows: DecodeRows

    @property
    def num_bytes(self) -> int:
        """Keys and values that one layer's attention reads."""
        tokens = int(self.rows.lengths_R.sum())
        return 2 * tokens * KV_HEADS * HEAD_DIM * self.query_RHD.element_size()


Variant = Callable[[LayerPages], Tensor]


def make_batch(num_rows: int, context: int, num_layers: int, device: torch.device) -> Batch:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    width = -(-context // PAGE)
    size = (num_layers, 2, num_rows * width + 1, PAGE, KV_HEADS, HEAD_DIM)
    cache = torch.randn(size, device=device, dtype=dtype)
    table = (torch.randperm(num_rows * width, device=device) + 1).view(num_rows, width).to(torch.int32)
    lengths = torch.full((num_rows,), context, dtype=torch.int32, device=device)
    query = torch.randn(num_rows, HEADS, HEAD_DIM, device=device, dtype=dtype)
    return Batch(query, [LayerPages(*layer) for layer in cache], DecodeRows(table, lengths, width * PAGE))


def variants(batch: Batch, device: torch.device) -> Iterator[tuple[str, list[LayerPages], Variant]]:
    """Name, caches and kernel; the first is what the others are compared with."""
    flash = kernel_for(device) if device.type == "cuda" else None
    if isinstance(flash, FlashAttention4):
        for name, options in FLASH_TILES.items():
            yield f"flash-attn-4{name}", batch.layers, partial(run_flash, flash, batch, options)
    else:
        plain = GatheringAttention()
        yield "reference", batch.layers, lambda pages: plain.decode(batch.query_RHD, pages, batch.rows, ARGS)
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    for tile in TILES if device.type == "cuda" else TILES[:1]:
        decode = TritonDecode(count, tile)
        yield (
            f"triton {tile}",
            batch.layers,
            lambda pages, run=decode: run(batch.query_RHD, pages, batch.rows, ARGS),
        )
    head_major = [
        LayerPages(*(part.transpose(1, 2).contiguous() for part in (pages.keys, pages.values)))
        for pages in batch.layers
    ]
    for tile in TILES if device.type == "cuda" else TILES[:1]:
        yield f"head-major {tile}", head_major, partial(run_head_major, batch, tile)


def run_flash(flash: FlashAttention4, batch: Batch, options: dict[str, Any], pages: LayerPages) -> Tensor:
    found = flash.interface._flash_attn_fwd(
        batch.query_RHD[:, None],
        pages.keys,
        pages.values,
        seqused_k=batch.rows.lengths_R,
        page_table=batch.rows.page_table_RP,
        max_seqlen_k=batch.rows.longest,
        softmax_scale=ARGS.scaling,
        **options,
    )
    return found[0].squeeze(1)


def run_head_major(batch: Batch, tile: DecodeTile, pages: LayerPages) -> Tensor:
    out = torch.empty_like(batch.query_RHD)
    keys, values = (
        TensorDescriptor.from_tensor(part.view(-1, HEAD_DIM), [tile.block, HEAD_DIM])
        for part in (pages.keys, pages.values)
    )
    head_major_kernel[(KV_HEADS, len(out))](
        batch.query_RHD,
        keys,
        values,
        batch.rows.page_table_RP,
        batch.rows.lengths_R,
        out,
        batch.rows.page_table_RP.shape[1],
        ARGS.scaling,
        H=HEADS,
        K=KV_HEADS,
        D=HEAD_DIM,
        PAGE=PAGE,
        GROUP=16,
        BLOCK=tile.block,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def seconds_per_layer(layers: list[LayerPages], run: Variant) -> float:
    """Median of four times three replays of all layers in one graph."""
    for pages in layers:
        run(pages)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pages in layers:
            run(pages)
    graph.replay()
    found = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 3e3 / len(layers))
    return sorted(found)[1]


def measure(context: int, device: torch.device, shown: bool) -> Iterator[dict[str, Any]]:
    on_device = device.type == "cuda"
    batch = make_batch(256 if on_device else 3, context, 8 if on_device else 1, device)
    expected: Tensor | None = None
    for name, layers, run in variants(batch, device):
        entry: dict[str, Any] = {"context": context, "kernel": name}
        try:
            found = run(layers[0]).float()
            expected = found if expected is None else expected
            entry["error"] = float((found - expected).norm() / expected.norm())
            if on_device:
                entry["seconds"] = seconds_per_layer(layers, run)
                entry["tb_per_s"] = batch.num_bytes / entry["seconds"] / 1e12
        except Exception as error:  # a tile that a kernel does not take must not hide what the others do
            entry["failed"] = f"{type(error).__name__}: {error}"[:200]
        if shown:
            print(entry, flush=True)
        yield entry


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true", help="one object at the end, nothing before")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    contexts = (512, 1024) if device.type == "cuda" else (200,)
    entries = [entry for context in contexts for entry in measure(context, device, not asked.json)]
    if asked.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        found = {"kernels": entries, "date": date, "device": name, "versions": package_versions()}
        print(json.dumps(found, indent=1))
    return 1 if any(entry.get("error", 0.0) > 2e-2 for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
