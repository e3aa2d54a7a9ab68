"""What a replica sends of its gradient: bounds, fixed sizes, and nothing lost between what is sent and what is kept."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.gradient_sync.compression import BLOCK, Dense, Int8, TopK, dequantise, quantise

COMPRESSORS = [Dense(), Int8(), TopK(0.1), TopK(0.1, in_int8=True)]


def gradient(size: int, seed: int = 0) -> torch.Tensor:
    """Elements over many orders of magnitude, some zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 10 ** torch.randint(-6, 3, (size,), generator=generator)
    return values * (torch.rand(size, generator=generator) > 0.1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3 * BLOCK), st.integers(0, 1000))
def test_an_int8_element_is_off_by_at_most_half_its_blocks_scale(size, seed):
    values = gradient(size, seed)
    steps, scale = quantise(values)
    assert steps.dtype == torch.int8 and len(scale) == math.ceil(size / BLOCK)
    bound = scale.repeat_interleave(BLOCK)[:size] / 2 * (1 + 1e-5)
    assert ((dequantise(steps, scale) - values).abs() <= bound).all()
    largest = torch.stack([block.abs().max() for block in values.split(BLOCK)])
    torch.testing.assert_close(scale * 127, largest)


def test_a_block_of_zeros_and_the_smallest_numbers_survive_int8():
    values = torch.zeros(2 * BLOCK)
    values[BLOCK:] = 1e-44  # below 127 times the least float32
    steps, scale = quantise(values)
    found = dequantise(steps, scale)
    assert torch.equal(found[:BLOCK], torch.zeros(BLOCK))
    assert torch.isfinite(found).all() and (found[BLOCK:] <= 1e-44).all()


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 3 * BLOCK), seed=st.integers(0, 1000))
def test_what_is_sent_and_what_is_held_back_add_up_to_the_gradient_bit_for_bit(compressor, size, seed):
    values = gradient(size, seed)
    payload = compressor.encode(values)
    assert payload.dtype == torch.uint8 and len(payload) == compressor.num_bytes(size)
    sent = compressor.decode(payload, size)
    held_back = values - sent
    assert torch.equal((sent.double() + held_back.double()).float(), values)
    assert torch.equal(sent.double() + held_back.double(), values.double())  # the difference has no rounding


def test_top_k_sends_the_elements_of_largest_magnitude_exactly():
    values = torch.tensor([0.1, -5.0, 3.0, 0.0, -0.2, 4.0, 1.0, 0.3, 0.2, 0.1])
    compressor = TopK(0.25)
    assert compressor.num_kept(10) == 3
    sent = compressor.decode(compressor.encode(values), 10)
    assert sent.tolist() == [0, -5, 3, 0, 0, 4, 0, 0, 0, 0]
    assert compressor.num_bytes(10) == 3 * 8
    assert TopK(0.001).num_kept(10) == 1
    assert TopK(0.001).num_kept(0) == 0


def test_int8_sends_about_a_quarter_and_top_k_in_int8_about_a_ninth_of_what_it_keeps():
    size = 1 << 16
    assert Int8().num_bytes(size) == size + 4 * size // BLOCK
    kept = TopK(0.01).num_kept(size)
    assert TopK(0.01, in_int8=True).num_bytes(size) == pytest.approx(5 * kept, rel=0.01)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_element_that_is_not_finite_is_not_hidden(compressor, bad):
    values = gradient(1000)
    values[700] = bad
    sent = compressor.decode(compressor.encode(values), 1000)
    assert not torch.isfinite(sent[700])
