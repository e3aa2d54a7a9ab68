"""The native engine: what it samples is what the trainer scores, and nobody's sample depends on its neighbours."""

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.inputs import packed_inputs, score
from paceline.model.logprob_head import HeadSettings
from paceline.rollout import NativeEngine, RolloutRequest, SamplingParams
from paceline.rollout.native.engine import EngineLimits
from paceline.rollout.native.sampling import draw_by_numbers, sample_tokens, uniform_numbers
from paceline.rollout.native.scheduler import Scheduler, Submission
from paceline.telemetry.ledger import Ledger
from paceline.types import Prompt

HEADER = tuple(range(10, 32))
EOS = 2


class Words:
    """Stands for a tokenizer: token ids as text."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(token) for token in ids if not (skip_special_tokens and token == EOS))


def engine(family="llama", max_running=64, dtype=torch.float32, **limits):
    return NativeEngine(
        tiny_model(family, dtype), Words(), EngineLimits(max_running, 4096, **limits), Ledger()
    )


def requests(num_prompts=3, num_samples=4, limit=8):
    return [
        RolloutRequest(
            Prompt(f"p{index}", (*HEADER, 40 + index, *range(50, 50 + index)), ""),
            tuple(1000 * index + sample for sample in range(num_samples)),
            limit,
        )
        for index in range(num_prompts)
    ]


def tokens(groups):
    return [[sample.token_ids for sample in group] for group in groups]


SAMPLED = SamplingParams(0.9, frozenset({EOS}))


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_the_trainers_on_the_same_tokens(family):
    native = engine(family)
    asked = requests()
    groups = native.generate(asked, SAMPLED)
    items = [
        PackItem(request.prompt.token_ids, tuple(sample.token_ids for sample in group))
        for request, group in zip(asked, groups, strict=True)
    ]
    model = native._model
    head = HeadSettings(SAMPLED.temperature, model.logit_softcap, 16)
    scored, _ = score(model, packed_inputs(build_pack(items, share_prefixes=False), model.device), head)
    sampled = torch.tensor([lp for group in groups for sample in group for lp in sample.logprobs])
    torch.testing.assert_close(scored, sampled, rtol=0, atol=1e-4)


def test_bfloat16_logprobs_agree_to_its_rounding():
    native = engine(dtype=torch.bfloat16)
    asked = requests()
    groups = native.generate(asked, SAMPLED)
    items = [
        PackItem(r.prompt.token_ids, tuple(s.token_ids for s in g))
        for r, g in zip(asked, groups, strict=True)
    ]
    pack = build_pack(items, share_prefixes=True)
    scored, _ = score(native._model, packed_inputs(pack, native._model.device), HeadSettings(0.9, None, 16))
    sampled = torch.tensor([lp for group in groups for sample in group for lp in sample.logprobs])
    assert (scored - sampled).abs().mean() < 0.1


@pytest.mark.parametrize("max_running", [1, 3, 4, 7, 64])
def test_samples_do_not_depend_on_how_many_run_together(max_running):
    expected = tokens(engine().generate(requests(), SAMPLED))
    assert tokens(engine(max_running=max_running).generate(requests(), SAMPLED)) == expected


def test_a_sample_depends_on_its_own_seed_and_prompt_only():
    everything = tokens(engine().generate(requests(), SAMPLED))
    alone = engine().generate([RolloutRequest(requests()[1].prompt, (1002,), 8)], SAMPLED)
    assert alone[0][0].token_ids == everything[1][2]


def test_the_same_engine_gives_the_same_samples_again_after_sleeping():
    native = engine()
    first = tokens(native.generate(requests(), SAMPLED))
    native.sleep()
    assert native._cache is None
    assert tokens(native.generate(requests(), SAMPLED)) == first


def test_a_prompt_is_computed_once_per_group_and_a_common_prefix_once():
    native = engine()
    native.generate(requests(num_prompts=3, num_samples=4), SAMPLED)
    own_tokens = sum(len(request.prompt.token_ids) - len(HEADER) for request in requests())
    assert native.stats.num_prefill_tokens == len(HEADER) + own_tokens


def test_stop_tokens_end_a_sample_and_belong_to_it():
    groups = engine().generate(requests(limit=30), SamplingParams(3.0, frozenset(range(0, 97, 5))))
    stopped = [sample for group in groups for sample in group if sample.finish_reason == "stop"]
    assert stopped
    for sample in stopped:
        assert sample.token_ids[-1] % 5 == 0
        assert all(token % 5 for token in sample.token_ids[:-1])


def test_limits_hold_and_ignoring_stop_tokens_fills_them():
    groups = engine().generate(requests(limit=5), SamplingParams(1.0, frozenset(range(97)), ignore_stop=True))
    assert {len(sample.token_ids) for group in groups for sample in group} == {5}
    assert {sample.finish_reason for group in groups for sample in group} == {"length"}


def test_trained_ids_are_the_sampled_ones_never_retokenised_text():
    native = engine()
    sample = native.generate(requests(), SAMPLED)[0][0]
    assert sample.text == Words().decode(sample.token_ids, True)
    assert len(sample.token_ids) == len(sample.logprobs) == len(sample.loss_mask)
    assert all(mask == 1 for mask in sample.loss_mask)


def test_greedy_takes_the_most_likely_token():
    native = engine()
    (group,) = native.generate(requests(num_prompts=1, num_samples=2), SamplingParams(0.0, frozenset({EOS})))
    assert group[0].token_ids == group[1].token_ids
    prompt = torch.tensor([requests()[0].prompt.token_ids])
    native._model.module.set_attn_implementation("eager")
    first = native._model.module(input_ids=prompt).logits[0, -1].argmax().item()
    assert group[0].token_ids[0] == first


def test_finished_samples_are_handed_over_at_once():
    seen = []
    groups = engine(max_running=4).generate(
        requests(), SAMPLED, lambda index, sample: seen.append((index, sample))
    )
    assert len(seen) == 12
    assert all(groups[index][sample.sample_index] == sample for index, sample in seen)


def test_new_weights_are_used_by_the_next_call_and_tagged_with_their_version():
    native = engine()
    before = native.generate(requests(), SAMPLED)
    with torch.no_grad():
        native._model.module.model.embed_tokens.weight.mul_(-1)
    native.weight_version = 7
    after = native.generate(requests(), SAMPLED)
    assert tokens(after) != tokens(before)
    assert {sample.weight_version for group in after for sample in group} == {7}


def test_a_memory_bound_runs_fewer_samples_at_a_time_or_refuses():
    per_slot = 32 * engine().layout.bytes_per_token
    native = engine(max_cache_bytes=5 * per_slot)
    expected = tokens(engine().generate(requests(), SAMPLED))
    assert tokens(native.generate(requests(), SAMPLED)) == expected
    assert native.stats.num_slots == 5
    with pytest.raises(ValueError, match="KV cache slot"):
        engine(max_cache_bytes=10).generate(requests(), SAMPLED)


def test_a_request_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="exceed the context of 128"):
        engine().generate(requests(limit=120), SAMPLED)


def waiting(*asked):
    scheduler = Scheduler()
    for number, request in enumerate(asked):
        submission = Submission(number, request, SAMPLED, capacity=32 * (number + 1))
        scheduler.add(submission, tuple(range(len(request.seeds))))
    return scheduler


def test_groups_wait_until_all_their_slots_are_free_and_larger_ones_are_cut():
    scheduler = waiting(*requests(num_prompts=2, num_samples=3))
    assert [a.sample_indices for a in scheduler.admit(0, 4, 64)] == [(0, 1, 2)]
    assert scheduler.admit(3, 4, 64) == []
    assert [a.submission.request_id for a in scheduler.admit(0, 4, 64)] == [1]
    cut = waiting(*requests(num_prompts=1, num_samples=5))
    assert [a.sample_indices for a in cut.admit(0, 2, 64)] == [(0, 1)]
    assert [a.sample_indices for a in cut.admit(0, 2, 64)] == [(2, 3)]
    assert [a.sample_indices for a in cut.admit(1, 2, 64)] == [(4,)]


def test_a_request_that_needs_larger_slots_waits_and_nobody_passes_it():
    scheduler = waiting(*requests(num_prompts=2, num_samples=1))
    scheduler.put_back(scheduler.admit(0, 4, 64))
    assert [a.submission.request_id for a in scheduler.admit(0, 4, 32)] == [0]
    assert scheduler.admit(0, 4, 32) == [] and scheduler.has_waiting


def test_uniform_numbers_are_even_independent_and_reproducible():
    numbers = uniform_numbers(list(range(2000)), [3] * 2000)
    assert (numbers == uniform_numbers(list(range(2000)), [3] * 2000)).all()
    assert 0.0 <= numbers.min() < 0.01 and 0.99 < numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.03
    again = uniform_numbers([5] * 2000, list(range(2000)))
    assert abs(again.mean() - 0.5) < 0.03


def test_frequencies_follow_the_distribution_and_impossible_tokens_never_appear():
    logits = torch.tensor([[2.0, 0.0, float("-inf"), 1.0]]).repeat(20_000, 1)
    drawn, logprobs = sample_tokens(logits, list(range(20_000)), [0] * 20_000)
    expected = logits[0].softmax(-1)
    found = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(found, expected, atol=0.015, rtol=0)
    assert found[2] == 0
    torch.testing.assert_close(logprobs, expected.log()[drawn])


def test_a_number_that_float32_rounds_up_to_one_draws_no_impossible_token():
    numbers = torch.tensor([0.0, 0.49, 0.51, 1.0 - 2.0**-53, 1.0])
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]]).repeat(5, 1)
    assert draw_by_numbers(logits.log_softmax(-1), numbers).tolist() == [0, 0, 2, 2, 2]


def test_drawn_log_probs_are_those_at_the_temperature():
    """Case 21: logits [2, 0] at temperature 0.5."""
    drawn, logprobs = sample_tokens(torch.tensor([[2.0, 0.0]]).repeat(400, 1) / 0.5, range(400), [0] * 400)
    assert set(drawn.tolist()) == {0, 1}
    expected = torch.tensor([-0.018150, -4.018150])[drawn]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
