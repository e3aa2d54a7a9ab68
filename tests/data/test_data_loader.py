import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import ConfigError
from paceline.data.loader import PromptLoader
from paceline.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(number), (number,), f"question {number}") for number in range(count)]


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in batch]


def in_order(count: int, num_prompts: int) -> PromptLoader:
    return PromptLoader(prompts(count), num_prompts, seed=0, shuffle=False)


def resumed(loader: PromptLoader, count: int, num_prompts: int, **options) -> PromptLoader:
    fresh = PromptLoader(prompts(count), num_prompts, **{"seed": 0, "shuffle": False, **options})
    fresh.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return fresh


def test_resume_replays_what_was_fetched_but_not_trained_and_nothing_else():
    loader = in_order(8, num_prompts=4)
    assert ids(loader.next_batch()) == ["0", "1", "2", "3"]
    loader.mark_consumed(["0", "1"])
    again = resumed(loader, 8, num_prompts=2)
    rest = [ids(again.next_batch()) for _ in range(3)]
    assert rest == [["2", "3"], ["4", "5"], ["6", "7"]]


def test_a_dropped_prompt_is_final_and_is_not_replayed():
    loader = in_order(8, num_prompts=4)
    loader.next_batch()
    loader.mark_consumed(["0", "1"])
    loader.mark_consumed(["2"])  # dropped as stale
    again = resumed(loader, 8, num_prompts=1)
    assert [ids(again.next_batch())[0] for _ in range(5)] == ["3", "4", "5", "6", "7"]


def test_a_prompt_in_flight_is_replayed_though_later_ones_are_trained():
    loader = in_order(8, num_prompts=4)
    loader.next_batch()
    loader.mark_consumed(["0", "1", "2"])
    loader.next_batch()
    loader.mark_consumed(["4", "5"])
    assert loader.state_dict()["cursor"] == 3
    assert loader.state_dict()["consumed_ahead"] == [4, 5]
    again = resumed(loader, 8, num_prompts=1)
    assert [ids(again.next_batch())[0] for _ in range(3)] == ["3", "6", "7"]


def test_filling_the_gap_after_a_resume_does_not_replay_what_was_trained_beyond_it():
    loader = in_order(8, num_prompts=4)
    loader.next_batch()
    loader.mark_consumed(["0", "2", "3"])
    again = resumed(loader, 8, num_prompts=1)
    order = []
    for _ in range(5):
        order += ids(again.next_batch())
        again.mark_consumed(order[-1:])
    assert order == ["1", "4", "5", "6", "7"]
    assert again.epoch == 1


def test_saving_and_resuming_between_steps_changes_no_later_batch():
    steady = PromptLoader(prompts(10), 4, seed=3)
    stopped = PromptLoader(prompts(10), 4, seed=3)
    for _ in range(25):
        batch = ids(steady.next_batch())
        assert ids(stopped.next_batch()) == batch
        steady.mark_consumed(batch)
        stopped.mark_consumed(batch)
        stopped = resumed(stopped, 10, 4, seed=3, shuffle=True)


def test_resume_keeps_the_batches_after_a_step_that_needed_extra_prompts():
    steady = PromptLoader(prompts(10), 4, seed=3)
    stopped = PromptLoader(prompts(10), 4, seed=3)
    for _ in range(25):
        used = []
        for loader in (steady, stopped):
            used.append(ids(loader.next_batch()) + ids(loader.extra(3)))
            loader.mark_consumed(used[-1])
        assert used[0] == used[1]
        stopped = resumed(stopped, 10, 4, seed=3, shuffle=True)


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own():
    loader = PromptLoader(prompts(12), 4, seed=0)
    epochs = []
    for _ in range(3):
        epoch = [name for _ in range(3) for name in ids(loader.next_batch())]
        loader.mark_consumed(epoch)
        epochs.append(epoch)
    assert all(sorted(epoch, key=int) == [str(number) for number in range(12)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader.epoch == 3
    assert loader.num_consumed == 36


def test_the_order_depends_on_the_seed():
    first, same, other = (ids(PromptLoader(prompts(50), 50, seed=seed).next_batch()) for seed in (1, 1, 2))
    assert first == same != other


def test_without_shuffling_every_epoch_has_the_given_order():
    loader = in_order(4, num_prompts=4)
    assert [ids(loader.next_batch()) for _ in range(2)] == [["0", "1", "2", "3"]] * 2


def test_a_batch_that_spans_epochs_never_holds_a_prompt_twice():
    loader = PromptLoader(prompts(10), 7, seed=0)
    counts: Counter[str] = Counter()
    for step in range(1, 101):
        batch = ids(loader.next_batch())
        assert len(set(batch)) == 7
        loader.mark_consumed(batch)
        counts.update(batch)
        if step % 10 == 0:  # a whole number of epochs: the put-off prompts have had their turn
            assert set(counts.values()) == {7 * step // 10}


def test_extra_prompts_differ_from_the_steps_own_until_all_are_used():
    loader = PromptLoader(prompts(6), 3, seed=0)
    step = ids(loader.next_batch()) + ids(loader.extra(2)) + ids(loader.extra(1))
    assert len(set(step)) == 6
    repeated = ids(loader.extra(2))
    assert len(repeated) == 2  # there is nothing new left to give
    loader.mark_consumed([*step, *repeated])
    assert loader.num_consumed == 8


def test_more_prompts_than_there_are_rows_is_refused_with_what_would_fit():
    with pytest.raises(ConfigError) as refused:
        in_order(18, num_prompts=32)
    assert (refused.value.key, refused.value.value, refused.value.nearest) == ("batch.num_prompts", 32, "18")
    assert len(in_order(18, num_prompts=18).next_batch()) == 18


def test_no_rows_are_refused():
    with pytest.raises(ConfigError, match="no training prompts"):
        in_order(0, num_prompts=1)


def test_marking_a_prompt_twice_or_unfetched_is_an_error():
    loader = in_order(4, num_prompts=2)
    loader.next_batch()
    loader.mark_consumed(["0"])
    with pytest.raises(ValueError, match="'0' is marked consumed but was not fetched"):
        loader.mark_consumed(["0"])
    with pytest.raises(ValueError, match="'3'"):
        loader.mark_consumed(["3"])


def test_a_state_of_other_prompts_or_another_seed_is_refused():
    state = PromptLoader(prompts(8), 2, seed=1).state_dict()
    PromptLoader(prompts(8), 4, seed=1).load_state_dict(state)  # the batch may change
    for other in (PromptLoader(prompts(8), 2, seed=2), PromptLoader(prompts(9), 2, seed=1), in_order(8, 2)):
        with pytest.raises(ConfigError, match="other training prompts"):
            other.load_state_dict(state)


def test_prompt_ids_must_differ():
    with pytest.raises(ValueError, match="unique"):
        PromptLoader([*prompts(2), *prompts(1)], 1, seed=0)


@settings(max_examples=300, deadline=None)
@given(
    num_rows=st.integers(2, 9),
    shuffle=st.booleans(),
    events=st.lists(
        st.tuples(st.sampled_from(["fetch", "extra", "mark", "crash"]), st.integers(0, 7)), max_size=40
    ),
)
def test_through_any_interleaving_every_epoch_is_trained_once_each(num_rows, shuffle, events):
    batch_size = max(1, num_rows // 2)
    loader = PromptLoader(prompts(num_rows), batch_size, seed=5, shuffle=shuffle)
    in_flight: list[str] = []
    trained: Counter[str] = Counter()
    for event, number in events:
        if event == "fetch":
            in_flight += ids(loader.next_batch())
        elif event == "extra":
            in_flight += ids(loader.extra(number))
        elif event == "mark" and in_flight:
            done = in_flight.pop(number % len(in_flight))
            loader.mark_consumed([done])
            trained[done] += 1
        elif event == "crash":
            loader = resumed(loader, num_rows, batch_size, seed=5, shuffle=shuffle)
            in_flight.clear()
    assert loader.num_in_flight == len(in_flight)
    loader.mark_consumed(in_flight)
    trained.update(in_flight)
    # What is left of the last begun epoch, fetched one at a time, completes it: nothing was lost or repeated.
    for _ in range(10_000):
        if loader.num_consumed % num_rows == 0 and not loader.state_dict()["consumed_ahead"]:
            break
        (prompt,) = loader.extra(1)
        loader.mark_consumed([prompt.prompt_id])
        trained[prompt.prompt_id] += 1
    assert set(trained.values()) <= {loader.epoch}
    assert len(trained) == (num_rows if loader.epoch else 0)
