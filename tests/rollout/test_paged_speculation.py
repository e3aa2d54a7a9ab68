"""Drafts change when tokens come, never which."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_native import EOS, Words, requests, tokens
from test_rollout_native import engine as slot_engine
from tiny_models import tiny_model

from paceline.model.exact import make_exact
from paceline.rollout import SamplingParams
from paceline.rollout.native.paged import PagedLimits
from paceline.rollout.native.paged.drafts import Drafter, DraftGauge, DraftSettings, NgramIndex
from paceline.rollout.native.paged.speculation import SpeculativeEngine
from paceline.telemetry.ledger import Ledger
from paceline.types import Sample

GREEDY = SamplingParams(0.0, frozenset({EOS}))


def speculative(mode="on", num_tokens=5, max_running=64, **limits):
    model = tiny_model("llama")
    paged = PagedLimits(64, 4096, page_tokens=4, **limits)
    drafts = DraftSettings(mode, num_tokens, max_running)
    return SpeculativeEngine(model, Words(), paged, Ledger(), drafts)


def sample(prompt_id, index, token_ids):
    count = len(token_ids)
    return Sample(prompt_id, index, tuple(token_ids), (0.0,) * count, (1,) * count, "length", 0, 0, "")


def test_a_run_of_tokens_is_followed_by_what_followed_it_last():
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 1, 2, 5])
    assert index.following((1, 2), 3) == (5,)
    assert index.following((2, 3), 2) == (4, 1)
    assert index.following((2, 5), 2) == () == index.following((9, 9), 2)


def test_nothing_is_found_across_the_beginning_or_the_end_of_a_text():
    index = NgramIndex()
    index.add([1, 2, 3])
    index.add([4, 5, 6])
    assert index.following((1, 2), 5) == (3,)
    assert index.following((2, 3), 5) == () == index.following((3, 4), 5)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 30))
def test_growing_in_parts_finds_what_growing_at_once_finds(text, cut):
    whole, parts = NgramIndex(), NgramIndex()
    whole.extend(text)
    parts.extend(text[:cut])
    parts.extend(text[cut:])
    for length in (2, 3, 4):
        for start in range(len(text)):
            run = tuple(text[start : start + length])
            assert whole.following(run, 4) == parts.following(run, 4)


def test_the_last_samples_of_a_prompt_draft_for_it_and_not_for_others():
    drafter = Drafter(DraftSettings(num_tokens=3))
    drafter.remember(0, sample("a", 0, [7, 8, 9, 10, 11]))
    assert drafter.draft(1, 0, "a", [1, 2, 3, 4], [], 10) == (7, 8, 9)
    assert drafter.draft(1, 0, "a", [1, 2, 3, 4], [7, 8], 10) == (9, 10, 11)
    assert drafter.draft(1, 0, "a", [1, 2, 3, 4], [7, 8], 1) == (9,)
    assert drafter.draft(1, 0, "a", [1, 2, 3, 4], [7, 8], 0) == ()
    assert drafter.draft(1, 0, "b", [1, 2, 3, 4], [7, 8], 10) == ()


def test_the_oldest_prompts_are_forgotten_when_memory_is_full():
    drafter = Drafter(DraftSettings(num_tokens=3, memory_tokens=8))
    for name in ("a", "b", "c"):
        drafter.remember(0, sample(name, 0, [7, 8, 9, 10]))
    assert drafter.draft(1, 0, "a", [1, 2], [7, 8], 9) == ()
    assert drafter.draft(1, 1, "c", [1, 2], [7, 8], 9) == (9, 10)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(1.0, frozenset({EOS})), SamplingParams(0.3, frozenset(range(0, 97, 7)))],
    ids=["greedy", "sampled", "sharp, many stop tokens"],
)
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_samples_are_those_of_decoding_one_by_one(params, num_tokens):
    expected = slot_engine().generate(requests(limit=24), params)
    native = speculative(num_tokens=num_tokens)
    for _ in range(2):  # the second time the first one's samples are the drafts
        found = native.generate(requests(limit=24), params)
        assert tokens(found) == tokens(expected)
        assert [[s.finish_reason for s in g] for g in found] == [
            [s.finish_reason for s in g] for g in expected
        ]
        for group, other in zip(found, expected, strict=True):
            for one, two in zip(group, other, strict=True):
                assert one.logprobs == pytest.approx(two.logprobs, abs=5e-5)
        assert native.stats.num_generated_tokens == sum(len(s.token_ids) for g in found for s in g)
        assert native.num_held_pages == 0
    assert 0 < native.stats.num_accepted_drafts <= native.stats.num_drafted_tokens


def test_what_was_said_before_takes_a_fraction_of_the_rounds():
    native = speculative(num_tokens=8)
    native.generate(requests(limit=30), SamplingParams(1.0, frozenset(), ignore_stop=True))
    first = native.stats.num_decode_steps
    native.generate(requests(limit=30), SamplingParams(1.0, frozenset(), ignore_stop=True))
    assert native.stats.num_decode_steps <= first / 3


def test_exact_log_probs_do_not_depend_on_drafts():
    params = SamplingParams(1.0, frozenset(), ignore_stop=True)
    model = tiny_model("llama")
    make_exact(model)
    plain, drafted = (
        SpeculativeEngine(
            model,
            Words(),
            PagedLimits(64, 4096, page_tokens=4),
            Ledger(),
            DraftSettings("on", 6, max_running=running),
        )
        for running in (0, 64)
    )
    for _ in range(2):
        expected, found = (native.generate(requests(limit=20), params) for native in (plain, drafted))
        assert found == expected
    assert plain.stats.num_drafted_tokens == 0 < drafted.stats.num_accepted_drafts


@pytest.mark.parametrize("num_pages", [11, 14, 20])
def test_a_cache_that_is_too_small_for_drafts_decodes_without_them(num_pages):
    params = SamplingParams(1.0, frozenset(), ignore_stop=True)
    expected = slot_engine().generate(requests(num_samples=6, limit=12), params)
    bound = num_pages * 4 * slot_engine().layout.bytes_per_token
    native = speculative(max_cache_bytes=bound)
    for _ in range(2):
        assert tokens(native.generate(requests(num_samples=6, limit=12), params)) == tokens(expected)
        assert native.num_held_pages == 0


def test_overlapping_rounds_and_aborts_lose_no_page_and_no_token():
    params = SamplingParams(1.0, frozenset(), ignore_stop=True)
    native = speculative(overlap=True)
    expected = native.generate(requests(limit=20), params)
    ids = [native.submit(request, params) for request in requests(limit=20)]
    found = {}
    for _ in range(4):
        for event in native.step():
            found.setdefault((event.request_id, event.sample_index), []).extend(event.token_ids)
    for event in native.abort(ids[0]):
        assert event.finished is not None
        whole = expected[0][event.sample_index]
        length = len(event.finished.token_ids)
        assert event.finished.token_ids == whole.token_ids[:length]
    while native.has_work:
        for event in native.step():
            found.setdefault((event.request_id, event.sample_index), []).extend(event.token_ids)
    for number, group in zip(ids[1:], expected[1:], strict=True):
        for one in group:
            assert tuple(found[number, one.sample_index]) == one.token_ids
    assert native.num_held_pages == 0


def test_drafts_that_do_not_pay_are_left_alone_for_longer_and_longer():
    gauge = DraftGauge(always=False)
    assert not gauge.is_due  # nothing to compare with yet
    gauge.plain(1.0)
    waits = []
    for _ in range(3):
        assert gauge.is_due
        gauge.verified(10.0, 2.0)
        waits.append(0)
        while not gauge.is_due:
            gauge.plain(1.0)
            waits[-1] += 1
    assert waits == sorted(waits) and waits[0] < waits[-1]


def test_drafts_that_pay_go_on():
    gauge = DraftGauge(always=False)
    gauge.plain(1.0)
    for _ in range(5):
        gauge.verified(2.0, 4.0)
        assert gauge.is_due
