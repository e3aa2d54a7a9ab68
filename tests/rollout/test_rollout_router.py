"""Several engine processes behind one queue: who gets what, and what is left when one dies."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_worker import toy_token

from paceline.rollout.errors import ReplicaDiedError, ReplicaError, ReplicaRefusedError
from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.rollout.remote.child import ChildCommand, EngineChild
from paceline.rollout.remote.engine import RemoteEngine, RemoteLimits
from paceline.rollout.remote.weight_files import WeightTransfer
from paceline.rollout.router import Balancer, ReplicaRouter, RouterSettings
from paceline.sync import WeightSyncError
from paceline.types import Prompt, Sample

ANY_LENGTH = SamplingParams(1.0, frozenset({2}))
WHOLE_LENGTH = SamplingParams(1.0, frozenset({2}), ignore_stop=True)
PATIENT = 120.0
TRANSFER = WeightTransfer("file", "/tmp")
WEIGHTS = [("a", torch.arange(6.0)), ("b", torch.ones(2, 2))]


class Words:
    def decode(self, ids, *, skip_special_tokens):
        return " ".join(map(str, ids))


def toy_command(setup):
    """As in another Python: no `__init__` of paceline runs there, so that a toy starts in a moment."""
    return ChildCommand("toy_worker", setup, sys.executable, {"PYTHONPATH": str(Path(__file__).parent)})


def toy(name, notify=lambda: None, silent_s=PATIENT, **setup):
    def open_child(notified):
        return EngineChild(name, toy_command(setup), notify=notified)

    return RemoteEngine(name, open_child, Words(), RemoteLimits(PATIENT, silent_s, TRANSFER), notify=notify)


@pytest.fixture
def router():
    opened = []

    def open_router(num_replicas, setups=None, silent_s=PATIENT, **settings):
        def open_replica(name, notify):
            return toy(name, notify, silent_s, **(setups or {}).get(name, {}))

        settings = {"transfer": TRANSFER, **settings}
        opened.append(ReplicaRouter(RouterSettings(num_replicas, **settings), open_replica))
        opened[-1].wait_ready()
        return opened[-1]

    yield open_router
    for one in opened:
        one.kill()


def requests(num_prompts, num_samples, limit=4, prompt_tokens=3):
    return [
        RolloutRequest(
            Prompt(f"p{index}", tuple(range(index, index + prompt_tokens)), ""),
            tuple(100 * index + sample for sample in range(num_samples)),
            limit,
        )
        for index in range(num_prompts)
    ]


def expected(request, whole=True):
    prompt = list(request.prompt.token_ids)
    lengths = [
        request.max_new_tokens if whole else seed % request.max_new_tokens + 1 for seed in request.seeds
    ]
    return [
        tuple(toy_token(prompt, seed, position)[0] for position in range(length))
        for seed, length in zip(request.seeds, lengths, strict=True)
    ]


def tokens(groups):
    return [[sample.token_ids for sample in group] for group in groups]


# --- who gets what: no engine needed ---


def test_idle_replicas_take_turns():
    balancer = Balancer(affinity_margin=0)
    for name in "abcd":
        balancer.add(name)
    chosen = []
    for prompt in range(200):
        chosen.append(balancer.acquire(prompt))
        balancer.release(chosen[-1])
    assert {name: chosen.count(name) for name in "abcd"} == dict.fromkeys("abcd", 50)


def test_turns_are_kept_while_other_replicas_are_busy():
    balancer = Balancer(affinity_margin=0)
    for name in "abcd":
        balancer.add(name)
    assert balancer.acquire("held") == "a"
    chosen = []
    for prompt in range(90):
        chosen.append(balancer.acquire(prompt))
        balancer.release(chosen[-1])
    assert {name: chosen.count(name) for name in "abcd"} == {"a": 0, "b": 30, "c": 30, "d": 30}


def test_a_group_stays_where_its_prompt_was_computed_until_the_margin_is_reached():
    balancer = Balancer(affinity_margin=2)
    for name in "ab":
        balancer.add(name)
    assert [balancer.acquire("p") for _ in range(5)] == ["a", "a", "a", "b", "b"]


def test_new_weights_leave_no_prompt_at_home():
    balancer = Balancer(affinity_margin=8)
    for name in "ab":
        balancer.add(name)
    balancer.release(balancer.acquire("p"))
    balancer.forget_prompts()
    assert balancer.acquire("p") == "b"


def test_a_full_replica_never_blocks_the_others():
    balancer = Balancer(affinity_margin=100, capacity=2)
    for name in "ab":
        balancer.add(name)
    assert [balancer.acquire("p") for _ in range(5)] == ["a", "a", "b", "b", None]
    balancer.release("b")
    assert balancer.acquire("p") == "b"
    balancer.release("b")
    assert balancer.acquire("q", full=frozenset({"b"})) is None


# --- with processes ---


def test_one_engine_process_returns_samples_in_the_order_of_requests_and_seeds():
    engine = toy("one")
    asked = requests(3, 4)
    seen = []
    groups = engine.generate(
        asked, ANY_LENGTH, lambda index, sample: seen.append((index, sample.sample_index))
    )
    assert tokens(groups) == [expected(request, whole=False) for request in asked]
    assert sorted(seen) == [(index, sample) for index in range(3) for sample in range(4)]
    assert engine.stats.num_generated_tokens == sum(len(s.token_ids) for g in groups for s in g)
    assert engine.stats.cache_bytes == 1000
    engine.close()
    assert engine._child.process.returncode == 0


def test_replicas_together_return_what_one_would(router):
    together = router(3, max_queued=4)
    asked = requests(7, 5)
    groups = together.generate(asked, ANY_LENGTH)
    assert tokens(groups) == [expected(request, whole=False) for request in asked]
    assert [[sample.sample_index for sample in group] for group in groups] == [list(range(5))] * 7
    assert together.stats.num_generated_tokens == sum(len(s.token_ids) for g in groups for s in g)
    assert set(together._balancer.loads.values()) == {0}
    assert not any(held.requests or held.pending for _, held in together._pool)


def test_a_killed_worker_loses_no_sample_and_none_comes_twice(router):
    """Case 2: four workers, worker 2 is killed after 3 of 8 samples."""
    together = router(4, {str(n): {"delay_s": 0.02, "max_running": 1} for n in range(4)}, max_restarts=0)
    asked = requests(1, 8, limit=5)
    finished = []

    def kill_worker_two(index, sample):
        finished.append(sample.sample_index)
        if len(finished) == 3:
            os.kill(together.replicas["2"].pid, signal.SIGKILL)

    together._balancer._margin = 0  # all four get samples of the one group
    began = time.monotonic()
    (group,) = together.generate(asked, WHOLE_LENGTH, kill_worker_two)
    assert time.monotonic() - began < PATIENT
    assert [sample.token_ids for sample in group] == expected(asked[0])
    assert sorted(finished) == list(range(8))
    assert together.stats.num_dead_replicas == 1
    assert together.stats.num_redone_samples >= 1
    assert "worker 2" in together.deaths[0] and "SIGKILL" in together.deaths[0]


def test_the_last_worker_that_dies_is_named_with_its_stage(router):
    together = router(1, {"0": {"delay_s": 0.02}}, max_restarts=0)
    together.submit(requests(1, 2, limit=50)[0], WHOLE_LENGTH)
    together.step()
    os.kill(together.replicas["0"].pid, signal.SIGKILL)
    with pytest.raises(ReplicaDiedError, match=r"rollout worker 0, stage rollout: died of SIGKILL") as caught:
        while True:
            together.step()
    assert caught.value.stage == "rollout"


def test_a_dead_worker_is_started_anew_with_the_weights_of_the_last_load(router):
    together = router(1, {"0": {"delay_s": 0.02}}, max_restarts=1)
    together.load_weights(WEIGHTS, version=7)
    asked = requests(2, 2, limit=10)
    killed = []

    def kill_once(index, sample):
        if not killed:
            killed.append(together.replicas["0"].pid)
            os.kill(killed[0], signal.SIGKILL)

    groups = together.generate(asked, ANY_LENGTH, kill_once)
    assert tokens(groups) == [expected(request, whole=False) for request in asked]
    assert {sample.weight_version for group in groups for sample in group} == {7}
    assert together.replicas["0"].pid != killed[0]


def test_a_silent_worker_counts_as_dead_and_its_samples_are_done_elsewhere(router):
    together = router(2, {"1": {"delay_s": 600.0}}, silent_s=3.0, max_restarts=0)
    asked = requests(2, 3)
    groups = together.generate(asked, ANY_LENGTH)
    assert tokens(groups) == [expected(request, whole=False) for request in asked]
    assert "silent for 3 s" in together.deaths[0]


def test_a_worker_that_never_serves_ends_the_start_and_the_others():
    engine = RemoteEngine(
        "slow",
        lambda notify: EngineChild("slow", toy_command({"never_ready": True}), notify=notify),
        Words(),
        RemoteLimits(1.0, PATIENT),
    )
    with pytest.raises(ReplicaDiedError, match="rollout worker slow, stage setup: not ready after 1 s"):
        engine.wait_ready()
    assert engine._child.process.returncode is not None


def test_a_wake_up_that_fails_half_way_releases_everything_and_can_be_tried_again(router):
    together = router(3, {"1": {"wake_failures": 1}})
    together.sleep()
    with pytest.raises(ReplicaRefusedError, match=r"worker 1.*no room for the cache"):
        together.wake()
    for replica in together.replicas.values():
        assert replica._child.call("memory", PATIENT) == {"asleep": True, "half_awake": False}
    together.wake()
    asked = requests(2, 2)
    assert tokens(together.generate(asked, ANY_LENGTH)) == [expected(r, whole=False) for r in asked]


def test_a_replica_that_cannot_wake_up_at_once_is_asked_again(router):
    together = router(1, {"0": {"wake_failures": 2}})
    together.sleep()
    asked = requests(2, 2)
    assert tokens(together.generate(asked, ANY_LENGTH)) == [expected(r, whole=False) for r in asked]
    assert together.stats.num_refusals == 2 and together.stats.num_dead_replicas == 0


def test_a_replica_that_never_wakes_up_ends_the_run_with_its_name_and_cause(router):
    together = router(1, {"0": {"wake_failures": 10**9}}, max_restarts=0, refusal_limit_s=1.5)
    together.sleep()
    with pytest.raises(ReplicaDiedError, match=r"worker 0.*refused work for .*no room for the cache"):
        together.generate(requests(2, 2), ANY_LENGTH)


def test_samples_of_a_replica_that_never_wakes_up_are_done_by_the_others(router):
    never = {"wake_failures": 10**9}
    together = router(2, {"0": never, "1": {"delay_s": 0.02}}, max_restarts=0, refusal_limit_s=0.0)
    together.sleep()
    asked = requests(3, 2)
    assert tokens(together.generate(asked, ANY_LENGTH)) == [expected(r, whole=False) for r in asked]
    assert together.stats.num_refusals == together.stats.num_dead_replicas == 1
    assert together.stats.num_redone_samples == 0  # it had begun none


@pytest.mark.parametrize("call", ["sleep", "wake", "score"])
def test_a_replica_that_is_dead_when_it_is_asked_for_something_is_started_anew(router, call):
    together = router(2)
    together.load_weights(WEIGHTS, version=4)
    if call == "wake":
        together.sleep()
    dead = together.replicas["1"].pid
    os.kill(dead, signal.SIGKILL)
    arguments = ([[1, 2, 3]],) if call == "score" else ()
    answer = getattr(together, call)(*arguments)
    assert answer == ([[-4.0, -4.0]] if call == "score" else None)
    assert "worker 1" in together.deaths[0]
    asked = requests(2, 2)
    groups = together.generate(asked, ANY_LENGTH)
    assert tokens(groups) == [expected(r, whole=False) for r in asked]
    assert {sample.weight_version for group in groups for sample in group} == {4}


def test_a_sleeping_engine_is_woken_by_a_request():
    engine = toy("one")
    engine.wait_ready()
    engine.sleep()
    asked = requests(1, 2)
    assert tokens(engine.generate(asked, ANY_LENGTH)) == [expected(asked[0], whole=False)]
    engine.close()


def test_aborted_samples_keep_their_tokens_and_go_on_through_prefixes(router):
    together = router(2, {str(n): {"delay_s": 0.02} for n in range(2)}, max_queued=2)
    (request,) = requests(1, 6, limit=200)
    handle = together.submit(request, WHOLE_LENGTH)
    events = []
    while len(events) < 12:
        events += together.step()
    aborted = {e.sample_index: e.finished for e in [*events, *together.abort(handle)] if e.finished}
    assert sorted(aborted) == list(range(6)) and not together.has_work and not together.num_waiting
    assert {sample.finish_reason for sample in aborted.values()} == {"abort"}
    assert not any(held.requests or held.pending for _, held in together._pool)
    assert any(sample.token_ids for sample in aborted.values())
    together.load_weights(WEIGHTS, version=3)
    again = RolloutRequest(request.prompt, request.seeds, 200, tuple(aborted[index] for index in range(6)))
    (group,) = together.generate([again], WHOLE_LENGTH)
    assert [sample.token_ids for sample in group] == expected(request)
    begun = [sample for index, sample in enumerate(group) if aborted[index].token_ids]
    assert all(sample.weight_version == 0 and set(sample.token_versions) == {0, 3} for sample in begun)


def test_prefixes_keep_their_loss_masks_and_finished_ones_come_back_as_they_are(router):
    together = router(2)
    (request,) = requests(1, 2, limit=6)
    tool = Sample("p0", 0, (7, 8), (0.0, -1.0), (0, 1), "abort", 0, 0, "")
    whole = Sample("p0", 1, (9, 2), (-1.0, -2.0), (1, 0), "stop", 0, 1, "")
    (group,) = together.generate([replace(request, prefixes=(tool, whole))], WHOLE_LENGTH)
    assert group[0].token_ids[:2] == (7, 8) and group[0].loss_mask == (0, 1, 1, 1, 1, 1)
    assert (group[1].token_ids, group[1].loss_mask, group[1].finish_reason) == ((9, 2), (1, 0), "stop")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("zeros", "received .*, the trainer published"),
        ("raises", "stage sync: load weights: OSError: link is down"),
        ("ignored", "its parameters did not change"),
    ],
)
def test_weights_that_do_not_arrive_are_an_error_and_the_version_stays(fault, message):
    """Case 30 (e), and an engine that takes new weights and goes on with the old ones."""
    engine = toy("one", load_fault=fault)
    changed = [(name, tensor + 1) for name, tensor in WEIGHTS]
    with pytest.raises((WeightSyncError, ReplicaError), match=message):
        engine.load_weights(WEIGHTS, version=1)
        engine.weight_version = 0
        engine.load_weights(changed, version=2)
    assert engine.weight_version == 0
    engine.kill()
