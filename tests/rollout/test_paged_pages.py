"""Pages: no sequence of submissions, rounds, aborts, sleeps and weight updates leaks one or loses a sample."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_paged_engine import paged
from test_rollout_native import SAMPLED

from paceline.rollout import RolloutRequest
from paceline.rollout.native.paged.pages import OutOfPagesError, PagePool, PrefixIndex
from paceline.rollout.native.paged.sizing import wanted_pages
from paceline.rollout.native.paged.work import decode_flops
from paceline.telemetry.flops import ModelShape, forward_flops
from paceline.types import Prompt


class EngineMachine(RuleBasedStateMachine):
    """A small cache, so that most rounds preempt."""

    def __init__(self):
        super().__init__()
        layout = paged().layout
        self.native = paged(
            max_running=5, budget=9, overlap=True, max_cache_bytes=9 * 4 * layout.bytes_per_token
        )
        self.open, self.missing = {}, {}

    @rule(prompt=st.integers(1, 14), samples=st.integers(1, 7), limit=st.integers(1, 12), start=st.booleans())
    def submit(self, prompt, samples, limit, start):
        tokens = tuple(range(10, 10 + prompt)) if start else tuple(range(50, 50 - prompt, -1))
        request = RolloutRequest(Prompt("p", tokens, ""), tuple(range(samples)), limit)
        number = self.native.submit(request, SAMPLED)
        self.open[number], self.missing[number] = request, set(range(samples))

    @rule()
    def step(self):
        self.take(self.native.step())

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data):
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.take(self.native.abort(number))
        assert number not in self.open  # every sample of it has been handed over

    @rule()
    def sleep(self):
        self.native.sleep()
        assert self.native.runner.cache_bytes == 0 and self.native.num_held_pages == 0

    @rule()
    def new_weights(self):
        self.native.load_weights([], self.native.weight_version + 1)

    def take(self, events):
        for event in events:
            if event.finished is None:
                continue
            self.missing[event.request_id].remove(event.sample_index)  # each exactly once
            if not self.missing[event.request_id]:
                del self.open[event.request_id]

    @invariant()
    def references_are_those_of_the_holders(self):
        scheduler = self.native._scheduler
        held = {}
        for occupant in scheduler.table.occupants:
            for page in occupant.pages if occupant else ():
                held[page] = held.get(page, 0) + 1
        for prefilling in scheduler._prefilling:
            for page in prefilling.pages:
                held[page] = held.get(page, 0) + 1
        pool = scheduler.pool
        assert {p: pool.num_holders(p) for p in range(1, pool.num_pages) if pool.num_holders(p)} == held
        assert pool.num_held == len(held)
        assert set(scheduler.index._keys) <= set(held)

    def teardown(self):
        for _ in range(3000):
            if not self.native.has_work:
                break
            self.take(self.native.step())
        assert not self.open
        assert self.native.num_held_pages == 0
        assert self.native._scheduler.table.num_free == 5


EngineMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
test_no_sequence_of_calls_leaks_a_page = EngineMachine.TestCase


def test_a_pool_hands_out_no_page_twice_and_takes_none_when_short():
    pool = PagePool(5)
    first = pool.take(3)
    assert len(set(first)) == 3 and 0 not in first
    with pytest.raises(OutOfPagesError):
        pool.take(2)
    assert pool.num_free == 1
    pool.share(first[:1])
    assert pool.release(first) == first[1:]
    assert pool.release(first[:1]) == first[:1]
    assert pool.num_held == 0
    pool.grow(9)
    assert len(set(pool.take(8))) == 8


def test_a_prefix_is_found_page_by_page_and_never_whole():
    index = PrefixIndex(2)
    index.add((1, 2, 3, 4, 5), [7, 8, 9], 0, 2)
    assert index.find((1, 2, 3, 4, 6)) == [7, 8]
    assert index.find((1, 2, 3, 4)) == [7]  # the last token must be computed: its hidden state draws the next
    assert index.find((1, 2, 9, 9, 9)) == [7]
    assert index.find((3, 4, 5)) == []
    index.forget([8])
    assert index.find((1, 2, 3, 4, 6)) == [7]
    index.clear()
    assert index.find((1, 2, 3, 4, 6)) == []


def test_wanted_pages_count_a_groups_prompt_once():
    request = RolloutRequest(Prompt("p", tuple(range(10)), ""), tuple(range(8)), 7)
    assert wanted_pages([request], 4, 64) == (2 + 1) + 8 * 2
    assert wanted_pages([request], 4, 3) == (2 + 1) + 3 * 2


@pytest.mark.parametrize("window", [0, 5])
def test_flops_of_a_round_are_those_of_its_segments(window):
    shape = ModelShape(2, 16, 4, 2, 4, 32, 50, sliding_window=window, num_windowed_layers=1 if window else 0)
    positions = [0, 3, 4, 5, 9]
    assert decode_flops(shape, np.asarray(positions)) == pytest.approx(
        forward_flops(shape, [(1, p) for p in positions], 5)
    )
