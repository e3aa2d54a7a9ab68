"""The paged engine: the slot engine's samples, however pages, rounds and preemptions fall."""

import pytest
import torch
from test_rollout_native import EOS, HEADER, SAMPLED, Words, requests, tokens
from test_rollout_native import engine as slot_engine
from tiny_models import FAMILIES, tiny_model

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.inputs import packed_inputs, score
from paceline.model.logprob_head import HeadSettings
from paceline.rollout import RolloutRequest, SamplingParams
from paceline.rollout.native.paged import PagedEngine, PagedLimits
from paceline.telemetry.ledger import Ledger
from paceline.types import Prompt

ENDLESS = SamplingParams(1.0, frozenset(), ignore_stop=True)


def paged(family="llama", max_running=64, budget=4096, page_tokens=4, **limits):
    model = tiny_model(family)
    return PagedEngine(
        model, Words(), PagedLimits(max_running, budget, page_tokens=page_tokens, **limits), Ledger()
    )


def logprobs(groups):
    return torch.tensor([lp for group in groups for sample in group for lp in sample.logprobs])


def bound_of(native, num_pages):
    return num_pages * native._page_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(0.0, frozenset({EOS}))], ids=["seeded", "greedy"])
def test_samples_are_the_slot_engines(family, params):
    expected = slot_engine(family).generate(requests(), params)
    found = paged(family).generate(requests(), params)
    assert tokens(found) == tokens(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-5)
    assert [[s.finish_reason for s in g] for g in found] == [[s.finish_reason for s in g] for g in expected]
    assert [[s.text for s in g] for g in found] == [[s.text for s in g] for g in expected]


@pytest.mark.parametrize("page_tokens", [1, 2, 5, 16, 64])
def test_samples_do_not_depend_on_the_page_size(page_tokens):
    expected = tokens(slot_engine().generate(requests(), SAMPLED))
    assert tokens(paged(page_tokens=page_tokens).generate(requests(), SAMPLED)) == expected


@pytest.mark.parametrize("max_running", [1, 3, 4, 7])
@pytest.mark.parametrize("budget", [1, 7, 30])
def test_samples_do_not_depend_on_how_prompts_are_cut_or_how_many_run(max_running, budget):
    expected = tokens(slot_engine().generate(requests(), SAMPLED))
    native = paged(max_running=max_running, budget=budget)
    assert tokens(native.generate(requests(), SAMPLED)) == expected
    assert native.num_held_pages == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_overlapping_rounds_give_identical_samples_and_counts(overlap):
    params = SamplingParams(3.0, frozenset(range(0, 97, 5)))
    expected = slot_engine().generate(requests(limit=30), params)
    native = paged(overlap=overlap)
    found = native.generate(requests(limit=30), params)
    assert tokens(found) == tokens(expected)
    # the token launched beside a stop token is dropped and counted nowhere
    assert native.stats.num_generated_tokens == sum(len(s.token_ids) for g in found for s in g)
    assert native.num_held_pages == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [11, 14, 20])
def test_a_cache_that_is_too_small_preempts_and_gives_the_same_samples(num_pages, overlap):
    expected = slot_engine().generate(requests(num_samples=6, limit=12), SAMPLED)
    native = paged(max_cache_bytes=num_pages * 4 * slot_engine().layout.bytes_per_token, overlap=overlap)
    found = native.generate(requests(num_samples=6, limit=12), SAMPLED)
    assert tokens(found) == tokens(expected)
    torch.testing.assert_close(
        logprobs(found), logprobs(expected), rtol=0, atol=5e-5
    )  # keys computed again in other products
    assert native.stats.num_preemptions > 0
    assert native.stats.num_preempted_tokens > 0
    assert native.stats.cache_bytes <= bound_of(native, num_pages)
    assert native.num_held_pages == 0


def test_without_a_bound_nothing_is_preempted():
    native = paged()
    native.generate(requests(num_samples=6, limit=12), SAMPLED)
    assert native.stats.num_preemptions == native.stats.num_preempted_tokens == 0


def test_a_prompt_is_computed_once_per_group_and_full_pages_of_a_common_prefix_once():
    native = paged()
    native.generate(requests(num_prompts=3, num_samples=4), SAMPLED)
    shared = len(HEADER) // 4 * 4  # full pages
    prompts = [len(request.prompt.token_ids) for request in requests()]
    assert native.stats.num_prefill_tokens == sum(prompts) - 2 * shared
    assert native.stats.num_prompt_tokens == sum(prompts)


def test_samples_of_a_group_hold_the_prompts_full_pages_together():
    native = paged()
    prompt = tuple(range(10, 20))  # two full pages of four, and half of one
    native.submit(RolloutRequest(Prompt("p", prompt, ""), tuple(range(6)), 2), SAMPLED)
    native.step()
    assert native.num_held_pages == 3
    native.step()
    assert native.num_held_pages == 0 or native.num_held_pages <= 2 + 6


def test_a_request_that_can_never_fit_is_refused_when_it_is_submitted():
    native = paged(max_cache_bytes=6 * 4 * slot_engine().layout.bytes_per_token)
    with pytest.raises(ValueError, match="one sample of 33 tokens takes 9 pages"):
        native.submit(requests(limit=10)[0], SAMPLED)
    with pytest.raises(ValueError, match="exceed the context of 128"):
        native.submit(requests(limit=120)[0], SAMPLED)
    assert not native.has_work


def test_sleeping_frees_the_cache_and_waking_takes_it_again():
    native = paged()
    expected = tokens(native.generate(requests(), SAMPLED))
    for _ in range(50):
        native.sleep()
        assert native.runner.cache_bytes == 0
        native.wake()
    assert tokens(native.generate(requests(), SAMPLED)) == expected
    assert native.num_held_pages == 0


def test_a_cache_that_cannot_be_taken_leaves_nothing_held_and_may_be_asked_for_again():
    native = paged()
    expected = tokens(slot_engine().generate(requests(), SAMPLED))
    take, failures = native.runner.take_cache, [MemoryError(), MemoryError()]

    def take_or_fail(*size):
        if failures:
            raise failures.pop()
        take(*size)

    native.runner.take_cache = take_or_fail
    with pytest.raises(MemoryError):
        native.generate(requests(), SAMPLED)
    assert native.num_held_pages == 0 and native.runner.cache_bytes == 0 and not native.has_work
    native.submit(requests()[0], SAMPLED)
    with pytest.raises(MemoryError):
        native.wake()
    assert native.num_held_pages == 0 and native.runner.cache_bytes == 0
    while native.has_work:
        native.step()
    assert tokens(native.generate(requests(), SAMPLED)) == expected


def test_sleeping_in_the_middle_loses_no_token():
    native = paged()
    numbers = {native.submit(request, SAMPLED): i for i, request in enumerate(requests())}
    finished = {}
    for round_number in range(100):
        if round_number in (2, 4):
            native.sleep()
        for event in native.step():
            if event.finished is not None:
                finished[numbers[event.request_id], event.sample_index] = event.finished
        if not native.has_work:
            break
    expected = slot_engine().generate(requests(), SAMPLED)
    assert {key: s.token_ids for key, s in finished.items()} == {
        (i, s.sample_index): s.token_ids for i, group in enumerate(expected) for s in group
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_sample_goes_on_from_its_prefix_to_the_same_end(overlap):
    asked = requests(num_prompts=1)[0]
    expected = slot_engine().generate([asked], SAMPLED)[0]
    native = paged(overlap=overlap)
    request_id = native.submit(asked, SAMPLED)
    events = [event for _ in range(4) for event in native.step()]
    events += native.abort(request_id)
    cut = {e.sample_index: e.finished for e in events if e.finished is not None}
    assert len(cut) == 4 and native.num_held_pages == 0 and not native.has_work
    assert any(s.finish_reason == "abort" and s.token_ids for s in cut.values())
    for index, sample in cut.items():
        told = [t for e in events if e.sample_index == index for t in e.token_ids]
        assert tuple(told) == sample.token_ids
    again = RolloutRequest(asked.prompt, asked.seeds, asked.max_new_tokens, tuple(cut[i] for i in range(4)))
    (found,) = native.generate([again], SAMPLED)
    assert [s.token_ids for s in found] == [s.token_ids for s in expected]
    torch.testing.assert_close(logprobs([found]), logprobs([expected]), rtol=0, atol=1e-5)


def test_tokens_say_which_version_sampled_them_and_new_requests_share_no_old_page():
    native = paged()
    first = native.submit(requests(num_prompts=1)[0], SAMPLED)
    events = [event for _ in range(3) for event in native.step()]
    native.load_weights([("model.norm.weight", native._model.module.model.norm.weight * 0.5)], version=5)
    native.submit(RolloutRequest(requests()[0].prompt, (7,), 4), SAMPLED)
    before = native.stats.num_prefill_tokens
    while native.has_work:
        events += native.step()
    assert native.stats.num_prefill_tokens - before == len(requests()[0].prompt.token_ids)
    samples = [e.finished for e in events if e.finished is not None and e.request_id == first]
    mixed = [s for s in samples if s.token_versions]
    assert mixed
    for sample in mixed:
        assert sample.weight_version == 0
        assert sorted(sample.token_versions) == list(sample.token_versions)
        assert set(sample.token_versions) == {0, 5}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sample_resumed_under_new_weights_is_theirs_beside_siblings_on_old_pages(overlap):
    """Case 30 (b): its prefix and its prompt are computed anew, though others of its prompt hold the old pages."""
    native = paged(overlap=overlap)
    asked = RolloutRequest(requests()[0].prompt, (1, 2), 16)
    stays, leaves = native.submit(asked, ENDLESS), native.submit(asked, ENDLESS)
    events = [event for _ in range(4) for event in native.step()]
    cut = sorted(
        (e.finished for e in native.abort(leaves) if e.finished is not None), key=lambda s: s.sample_index
    )
    kept = [len(sample.token_ids) for sample in cut]
    assert min(kept) > 0 and native.num_held_pages > 0
    model = native._model.module
    scaled = {name: p.detach() * 1.1 for name, p in model.named_parameters() if "proj" in name}
    native.load_weights(scaled.items(), version=3)
    again = native.submit(RolloutRequest(asked.prompt, asked.seeds, 16, tuple(cut)), ENDLESS)
    while native.has_work:
        events += native.step()
    resumed = {e.sample_index: e.finished for e in events if e.request_id == again and e.finished is not None}
    assert sorted({e.request_id for e in events if e.finished is not None}) == [stays, again]
    for index, sample in resumed.items():
        assert sample.token_versions == (0,) * kept[index] + (3,) * (16 - kept[index])
        assert sample.token_ids[: kept[index]] == cut[index].token_ids
        assert sample.logprobs[: kept[index]] == cut[index].logprobs
        items = [PackItem(asked.prompt.token_ids, (sample.token_ids,))]
        inputs = packed_inputs(build_pack(items, share_prefixes=False), native._model.device)
        with torch.no_grad():
            expected, _ = score(native._model, inputs, HeadSettings(1.0, None, 16))
        found = torch.tensor(sample.logprobs)
        torch.testing.assert_close(found[kept[index] :], expected[kept[index] :], rtol=0, atol=1e-5)
        assert (found - expected)[: kept[index]].abs().max() > 1e-3  # the old weights said otherwise


def test_a_name_the_model_does_not_have_changes_no_version():
    native = paged()
    with pytest.raises(ValueError, match=r"nothing .1,. is no parameter"):
        native.load_weights([("nothing", torch.zeros(1))], version=3)
    assert native.weight_version == 0


def test_requests_of_different_temperatures_run_together():
    asked = requests(num_prompts=2)
    params = [SAMPLED, SamplingParams(0.0, frozenset({EOS}))]
    native = paged()
    numbers = {native.submit(r, p): i for i, (r, p) in enumerate(zip(asked, params, strict=True))}
    found = {}
    while native.has_work:
        for event in native.step():
            if event.finished is not None:
                found[numbers[event.request_id], event.sample_index] = event.finished.token_ids
    for index in range(2):
        (expected,) = slot_engine().generate([asked[index]], params[index])
        assert [found[index, s] for s in range(4)] == [s.token_ids for s in expected]


def test_the_cache_grows_while_samples_run_and_their_tokens_stay():
    native = paged()
    numbers = {}
    found = {}
    asked = requests(num_prompts=3)
    for index in range(3):
        numbers[native.submit(asked[index], SAMPLED)] = index
        for event in native.step():
            if event.finished is not None:
                found[numbers[event.request_id], event.sample_index] = event.finished.token_ids
    while native.has_work:
        for event in native.step():
            if event.finished is not None:
                found[numbers[event.request_id], event.sample_index] = event.finished.token_ids
    expected = slot_engine().generate(asked, SAMPLED)
    assert found == {(i, s.sample_index): s.token_ids for i, g in enumerate(expected) for s in g}
