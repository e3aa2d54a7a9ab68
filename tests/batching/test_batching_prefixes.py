"""Case 7, layout part: labels come from structure, and every token sees exactly its own prompt and response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.batching.prefixes import PackItem, build_pack, header_length

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)  # few ids, so that prefixes coincide by chance
ITEMS = st.lists(st.builds(PackItem, TOKENS, st.lists(TOKENS, max_size=3)), max_size=4)


def context_of(plan, row_index):
    """Ids a position sees: its segment up to and including itself, and its ancestors whole, in order."""
    number = next(
        number
        for number, segment in enumerate(plan.segments)
        if segment.start <= row_index < segment.start + segment.length
    )
    end = row_index + 1
    ids = []
    while number >= 0:
        segment = plan.segments[number]
        ids = [*plan.token_ids[segment.start : end].tolist(), *ids]
        number = segment.parent
        end = plan.segments[number].start + plan.segments[number].length
    return ids


def labels(plan):
    """{(item, response): [(what the source position sees, target), ...]}"""
    found = {}
    keys = zip(plan.item_index.tolist(), plan.response_index.tolist(), strict=True)
    for key, source, target in zip(keys, plan.source.tolist(), plan.targets.tolist(), strict=True):
        found.setdefault(key, []).append((context_of(plan, source), target))
    return found


@given(ITEMS, st.booleans(), st.integers(1, 4))
def test_every_response_token_is_predicted_from_its_own_prompt_and_what_came_before_it(
    items, share, min_header
):
    plan = build_pack(items, share, min_header)
    expected = {
        (i, r): [([*item.prompt, *response[:j]], response[j]) for j in range(len(response))]
        for i, item in enumerate(items)
        for r, response in enumerate(item.responses)
    }
    assert labels(plan) == expected


@given(ITEMS, st.booleans(), st.integers(1, 4))
def test_segments_partition_the_row_and_positions_count_what_a_token_sees(items, share, min_header):
    plan = build_pack(items, share, min_header)
    end = 0
    for number, segment in enumerate(plan.segments):
        assert (segment.start, segment.parent < number) == (end, True)
        assert segment.length > 0
        end += segment.length
    assert end == len(plan.token_ids) == len(plan.position_ids)
    for row_index, position in enumerate(plan.position_ids.tolist()):
        assert position == len(context_of(plan, row_index)) - 1


@given(ITEMS, st.booleans())
def test_every_item_leaves_its_prompt_in_the_row_even_without_responses(items, share):
    plan = build_pack(items, share, min_header=1)
    ends = {tuple(context_of(plan, s.start + s.length - 1)) for s in plan.segments}
    for item in items:
        wanted = {tuple(item.prompt)} if share else {(*item.prompt, *r) for r in item.responses or [()]}
        assert wanted <= ends


def test_two_packed_sequences_have_three_targets():
    items = [PackItem([10], [[11, 12]]), PackItem([20], [[21]])]
    for share in (True, False):
        plan = build_pack(items, share)
        assert plan.targets.tolist() == [11, 12, 21]
        assert [plan.token_ids[source] for source in plan.source] == [10, 11, 20]


def test_changing_one_item_leaves_the_labels_of_the_other_alone():
    second = PackItem([20], [[21]])
    first = [PackItem([10], [[11, 12]]), PackItem([60], [[61, 62]])]
    for share in (True, False):
        before, after = (labels(build_pack([item, second], share)) for item in first)
        assert before[1, 0] == after[1, 0] == [([20], 21)]


def test_prompt_and_header_are_laid_out_once():
    header = list(range(100, 120))
    items = [PackItem([*header, 1], [[5, 6], [7]]), PackItem([*header, 2, 3], [[8]])]
    plan = build_pack(items, share_prefixes=True)
    assert [(s.kind, s.start, s.length, s.parent) for s in plan.segments] == [
        ("header", 0, 20, -1),
        ("prompt", 20, 1, 0),
        ("response", 21, 2, 1),
        ("response", 23, 1, 1),
        ("prompt", 24, 2, 0),
        ("response", 26, 1, 4),
    ]
    assert plan.token_ids.tolist() == [*header, 1, 5, 6, 7, 2, 3, 8]
    assert plan.position_ids.tolist() == [*range(20), 20, 21, 22, 21, 20, 21, 22]
    assert plan.source.tolist() == [20, 21, 20, 25]
    assert plan.targets.tolist() == [5, 6, 7, 8]


def test_without_sharing_every_sample_is_a_sequence_of_its_own():
    plan = build_pack([PackItem([1, 2], [[5, 6], [7]])], share_prefixes=False)
    assert [(s.kind, s.start, s.length, s.parent) for s in plan.segments] == [
        ("sequence", 0, 4, -1),
        ("sequence", 4, 3, -1),
    ]
    assert plan.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize(
    ("prompts", "min_header", "length"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5]], 3, 3),
        ([[1, 2, 3, 4], [1, 2, 3, 5]], 4, 0),  # too short to be worth it
        ([[1, 2, 3], [1, 2, 3]], 1, 2),  # equal prompts keep a token of their own
        ([[1, 2, 3], [1, 2, 3, 4]], 1, 2),  # one is a prefix of the other
        ([[1, 2, 3]], 1, 0),  # nobody to share with
        ([[1], [1]], 1, 0),
        ([], 1, 0),
        ([[1, 2, 9, 9], [1, 2, 3, 3], [1, 8, 1, 1]], 1, 1),  # of all, not of the first two
    ],
)
def test_the_header_is_the_longest_common_prefix_that_leaves_every_prompt_a_token(
    prompts, min_header, length
):
    assert header_length(prompts, min_header) == length


def test_a_prompt_that_equals_another_prompt_plus_its_response_stays_apart():
    items = [PackItem([1, 2], [[3, 4]]), PackItem([1, 2, 3], [[4, 5]])]
    plan = build_pack(items, share_prefixes=True, min_header=1)
    assert labels(plan) == {
        (0, 0): [([1, 2], 3), ([1, 2, 3], 4)],
        (1, 0): [([1, 2, 3], 4), ([1, 2, 3, 4], 5)],
    }


@pytest.mark.parametrize("item", [PackItem([], [[1]]), PackItem([1], [[]]), PackItem([1], [[2], []])])
@pytest.mark.parametrize("share", [True, False])
def test_empty_prompts_and_responses_are_refused_by_number(item, share):
    with pytest.raises(ValueError, match="item 1"):
        build_pack([PackItem([1], [[2]]), item], share)


def test_an_empty_row_has_no_tokens():
    for share in (True, False):
        plan = build_pack([], share)
        assert (plan.segments, len(plan.token_ids), len(plan.targets)) == ((), 0, 0)
