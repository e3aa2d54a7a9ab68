"""Over-sampling: the groups that are complete first, the others aborted with what they had, nothing left behind."""

from dataclasses import replace

import pytest
from test_paged_engine import paged
from test_rollout_native import SAMPLED, requests, tokens
from test_rollout_native import engine as slot_engine

from paceline.rollout import SamplingParams
from paceline.rollout.early_stop import EarlyStopped, generate_enough
from paceline.types import Sample

ENDLESS = SamplingParams(1.0, frozenset(), ignore_stop=True)
ENGINES = {"slots": slot_engine, "pages": paged, "overlapping pages": lambda: paged(overlap=True)}


def unequal(limits=(4, 20, 5, 20)):
    """Requests whose groups end after so many tokens."""
    wanted = requests(num_prompts=len(limits))
    return [replace(request, max_new_tokens=limit) for request, limit in zip(wanted, limits, strict=True)]


@pytest.mark.parametrize("kind", ENGINES)
def test_the_groups_that_are_complete_first_are_kept_and_the_rest_is_aborted(kind):
    native = ENGINES[kind]()
    whole = slot_engine().generate(unequal(), ENDLESS)
    seen = []
    found = generate_enough(native, unequal(), ENDLESS, 2, lambda index, sample: seen.append(index))
    assert found.complete == (0, 2)
    assert tokens(found.groups) == tokens([whole[0], whole[2]])
    assert seen == [0] * 4 + [2] * 4
    assert all(sample.finish_reason == "abort" for sample in found.dropped)
    for sample, other in zip(found.dropped, (*whole[1], *whole[3]), strict=True):
        assert 0 < len(sample.token_ids) < 20
        assert sample.token_ids == other.token_ids[: len(sample.token_ids)]
    assert not native.has_work and native.num_running == 0
    # the engine goes on as if nothing had been
    assert tokens(native.generate(unequal(), ENDLESS)) == tokens(whole)


def test_all_groups_wanted_is_plain_generation():
    expected = slot_engine().generate(requests(), SAMPLED)
    found = generate_enough(slot_engine(), requests(), SAMPLED, len(requests()))
    assert tokens(found.groups) == tokens(expected)
    assert found.dropped == () and found.num_dropped_tokens == 0 and found.length_ratio == 0.0


def test_of_groups_that_complete_together_the_first_requests_are_kept():
    found = generate_enough(slot_engine(), unequal((6, 6, 6, 6)), ENDLESS, 2)
    assert found.complete == (0, 1)
    assert {sample.finish_reason for sample in found.dropped} == {"length"}


def test_the_lean_towards_short_responses_is_told():
    def sample(count: int) -> Sample:
        return Sample("p", 0, (1,) * count, (0.0,) * count, (1,) * count, "length", 0, 0, "")

    found = EarlyStopped((0,), ((sample(10), sample(20)),), (sample(30), sample(60)))
    assert found.num_dropped_tokens == 90
    assert found.length_ratio == pytest.approx(45 / 15)


@pytest.mark.parametrize("num_groups", [0, 5])
def test_more_or_fewer_groups_than_there_can_be_are_refused(num_groups):
    with pytest.raises(ValueError, match="wanted of 4"):
        generate_enough(slot_engine(), unequal(), ENDLESS, num_groups)


def test_an_error_in_a_callback_leaves_no_sample_running():
    native = slot_engine()

    def fail(index: int, sample: Sample) -> None:
        raise RuntimeError("no room for this sample")

    with pytest.raises(RuntimeError, match="no room"):
        generate_enough(native, unequal(), ENDLESS, 2, fail)
    assert not native.has_work and native.num_running == 0
