"""What a round on a device does, run on a CPU: blocks, numbers, draws, fused layers, and whole samples."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_paged_engine import logprobs, paged
from test_rollout_native import EOS, SAMPLED, requests, tokens
from test_rollout_native import engine as slot_engine
from tiny_models import FAMILIES, tiny_model

from paceline.model.fused import fuse_layers
from paceline.model.fused.reference import ReferenceElementwise
from paceline.rollout import SamplingParams
from paceline.rollout.native.cache import KVLayout
from paceline.rollout.native.paged.attention import GatheringAttention
from paceline.rollout.native.paged.batches import DecodeBatch, DrawRows
from paceline.rollout.native.paged.cache import PagedCache, PagedPlan
from paceline.rollout.native.paged.decoder import fused_hidden
from paceline.rollout.native.paged.device import (
    DeviceRows,
    block_size,
    draw_tokens,
    fill_block,
    uniform_numbers_on_device,
)
from paceline.rollout.native.paged.device_runner import batch_sizes
from paceline.rollout.native.paged.kernels import flash_takes
from paceline.rollout.native.paged.make_runner import has_fixed_rotation
from paceline.rollout.native.sampling import sample_tokens, uniform_numbers


def rows_of(batch, num_rows, width, scratch=9):
    block = torch.full((block_size(num_rows, width),), -7, dtype=torch.int64)
    fill_block(block, batch, num_rows, width, scratch)
    return DeviceRows.of_block(block, num_rows, width)


def batch_of(positions, width=3, temperatures=None):
    used = len(positions)
    table = np.arange(1, used * width + 1, dtype=np.int32).reshape(used, width)
    seeds = np.array([2**63 + 5 * i for i in range(used)], dtype=np.uint64)
    draw = DrawRows(np.arange(used), seeds, np.arange(used) + 2, np.asarray(temperatures or [1.0] * used))
    return DecodeBatch(draw, np.asarray(positions), table)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_numbers_on_the_device_are_the_hosts_bit_for_bit(pairs):
    seeds, counts = zip(*pairs, strict=True)
    bits = torch.from_numpy(np.asarray(seeds, dtype=np.uint64).view(np.int64))
    found = uniform_numbers_on_device(bits, torch.tensor(counts))
    assert (found.numpy() == uniform_numbers(seeds, counts)).all()


def test_a_block_carries_a_batch_and_fills_up_with_scratch_rows():
    rows = rows_of(batch_of([4, 0, 11], temperatures=[1.0, 0.0, 0.5]), 5, 4)
    assert rows.slots_R.tolist() == [0, 1, 2, 9, 9]
    assert rows.seeds_R.numpy().view(np.uint64)[:3].tolist() == [2**63, 2**63 + 5, 2**63 + 10]
    assert rows.positions_R.tolist() == [4, 0, 11, 0, 0]
    assert rows.lengths_R.tolist() == [5, 1, 12, 1, 1]
    assert rows.temperatures_R.tolist() == [1.0, 0.0, 0.5, 1.0, 1.0]
    assert rows.page_table_RP.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 0], [0] * 4, [0] * 4]


def test_draws_on_the_device_are_the_hosts():
    torch.manual_seed(0)
    batch = batch_of([0] * 40, temperatures=[0.7] * 20 + [0.0] * 20)
    rows, last = rows_of(batch, 40, 3, scratch=40), torch.zeros(41, dtype=torch.int64)
    logits = torch.randn(40, 97) * 2
    found, found_logprobs = draw_tokens(logits, rows, last, None)
    seeds, counts = batch.draw.seeds_R.tolist(), batch.draw.counts_R.tolist()
    drawn, drawn_logprobs = sample_tokens(logits[:20] / 0.7, seeds[:20], counts[:20])
    greedy, greedy_logprobs = sample_tokens(logits[20:], seeds[20:], counts[20:], greedy=True)
    assert torch.equal(found, torch.cat([drawn, greedy]))
    torch.testing.assert_close(found_logprobs, torch.cat([drawn_logprobs, greedy_logprobs]))
    assert torch.equal(last[:40], found)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_in_blocks_give_the_slot_engines_samples(family, overlap):
    for params in (SAMPLED, SamplingParams(0.0, frozenset({EOS}))):
        expected = slot_engine(family).generate(requests(), params)
        native = paged(family, max_running=9, overlap=overlap, runner="device")
        found = native.generate(requests(), params)
        assert tokens(found) == tokens(expected)
        torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-5)


def test_rounds_in_blocks_preempt_sleep_and_wake_with_the_same_samples():
    expected = tokens(slot_engine().generate(requests(num_samples=6, limit=12), SAMPLED))
    native = paged(
        max_cache_bytes=14 * 4 * slot_engine().layout.bytes_per_token, overlap=True, runner="device"
    )
    for _ in range(2):
        assert tokens(native.generate(requests(num_samples=6, limit=12), SAMPLED)) == expected
        assert native.stats.num_preemptions > 0
        native.sleep()
        assert native.runner.cache_bytes == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_decoding_equals_the_models_own_layers(family):
    model = tiny_model(family)
    shape = model.shape
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype, model.device)
    rows = rows_of(batch_of([7, 0, 10]), 4, 4)
    caches = [PagedCache(layout, 4, 10) for _ in range(2)]
    torch.manual_seed(1)
    caches[0].data.normal_()
    caches[1].data.copy_(caches[0].data)
    ids, places = torch.tensor([5, 6, 7, 8]), torch.tensor([2 * 4 + 3, 4 * 4, 9 * 4 + 2, 0])
    plan = PagedPlan(caches[0], GatheringAttention(), places, rows.decode_rows(4))
    with torch.inference_mode():
        expected = model.hidden(ids[None], rows.positions_R[None], plan)
        ops = ReferenceElementwise()
        assert fuse_layers(model.module, ops).num_layers == 2

        def rotate_and_store(qkv, query_weight, key_weight, cos, sin, heads, pages, rows):
            query, key = ops.rotate(qkv, query_weight, key_weight, cos, sin, heads)
            pages.keys.flatten(0, 1)[places] = key
            start = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
            pages.values.flatten(0, 1)[places] = qkv[:, start:].unflatten(1, (-1, heads.head_dim))
            return query

        found = fused_hidden(model, ids, rows, caches[1], GatheringAttention(), rotate_and_store)
    torch.testing.assert_close(found[:3], expected[:3], rtol=0, atol=1e-5)
    torch.testing.assert_close(caches[1].data, caches[0].data, rtol=0, atol=1e-5)


def test_rotations_that_follow_the_longest_position_are_not_captured():
    for family in FAMILIES.values():
        assert has_fixed_rotation(family.to_dict())
    assert not has_fixed_rotation({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    assert not has_fixed_rotation({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}})


def test_captured_batch_sizes_end_at_the_largest_and_are_close_together():
    assert batch_sizes(1) == (1,)
    assert batch_sizes(5) == (1, 2, 4, 5)
    sizes = batch_sizes(512)
    assert sizes[-1] == 512 and all(b - a <= 32 for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("capability", "head_dim", "page_tokens", "takes"),
    [
        ((9, 0), 128, 128, True),
        ((9, 0), 64, 128, True),
        ((9, 0), 256, 128, False),  # its tiles of keys are shorter than a page
        ((9, 0), 128, 16, False),
        ((12, 0), 128, 128, False),
    ],
)
def test_the_library_gets_pages_only_where_it_copies_them_whole(capability, head_dim, page_tokens, takes):
    assert flash_takes(capability, head_dim, page_tokens) == takes
