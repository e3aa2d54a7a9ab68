"""A rollout dealt out over ranks: every sample once, evenly, seeds and numbers kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rollout import RolloutRequest
from paceline.schedules.sharing import into_groups, own_parts
from paceline.types import Prompt, Sample, Verdict


def request(index: int, num_samples: int) -> RolloutRequest:
    prompt = Prompt(f"p{index}", (1, 2), f"prompt {index}")
    return RolloutRequest(prompt, tuple(100 * index + number for number in range(num_samples)), 4)


def generated(rank_request: RolloutRequest) -> list[Sample]:
    """What an engine returns: numbered from 0 within the request it was given."""
    return [
        Sample(rank_request.prompt.prompt_id, number, (7,), (-1.0,), (1,), "stop", 0, seed, str(seed))
        for number, seed in enumerate(rank_request.seeds)
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 8))
def test_every_sample_is_drawn_once_under_its_own_seed_and_number(sizes: list[int], num_ranks: int) -> None:
    requests = [request(index, size) for index, size in enumerate(sizes)]
    scored, counts = [], []
    for rank in range(num_ranks):
        parts = own_parts(requests, num_ranks, rank)
        mine = [(part.own(s), Verdict("score", 1.0, 0.0)) for part in parts for s in generated(part.request)]
        scored += mine
        counts.append(len(mine))
    groups = into_groups(requests, scored)
    for group, expected in zip(groups, requests, strict=True):
        assert group.prompt is expected.prompt
        assert tuple(sample.seed for sample in group.samples) == expected.seeds
        assert [sample.sample_index for sample in group.samples] == list(range(len(expected.seeds)))
    assert max(counts) - min(counts) <= 1


def test_groups_stay_whole_where_ranks_divide_them() -> None:
    requests = [request(index, 8) for index in range(8)]
    for rank in range(4):
        parts = own_parts(requests, 4, rank)
        assert [part.request.prompt.prompt_id for part in parts] == [f"p{2 * rank}", f"p{2 * rank + 1}"]
        assert all(len(part.request.seeds) == 8 for part in parts)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_hundred_rows_of_one_sample_are_dealt_out_completely(num_ranks: int) -> None:
    requests = [request(index, 1) for index in range(100)]
    dealt = [
        part.request.prompt.prompt_id
        for rank in range(num_ranks)
        for part in own_parts(requests, num_ranks, rank)
    ]
    assert dealt == [f"p{index}" for index in range(100)]


def test_one_rank_is_given_the_requests_as_they_are() -> None:
    requests = [request(0, 3), request(1, 2)]
    assert [part.request for part in own_parts(requests, 1, 0)] == requests
