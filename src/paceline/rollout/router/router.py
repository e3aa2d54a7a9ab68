"""One queue in front of several rollout engines.

Samples wait in one global queue (`queue.py`) and are handed out one by one (`balance.py`), consecutive ones of a group
as one request. A replica that dies loses nothing (`pool.py`): its unfinished samples go back to the head of the queue,
and whatever it may still have sent is not looked at, so nothing comes twice. It is started anew, with the weights of
the last load, as long as `max_restarts` allows; with no replica left the run ends and says which died of what.

Everything happens in the caller's thread, inside `step`; replicas' threads only wake it.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from paceline.rollout.driving import generate_by_steps
from paceline.rollout.errors import ReplicaDiedError, ReplicaRefusedError
from paceline.rollout.protocol import OnSample, RolloutRequest, RolloutStats, SampleEvent, SamplingParams
from paceline.rollout.replica import GenerationFlops, Replica
from paceline.rollout.router.balance import Balancer
from paceline.rollout.router.pool import HeldReplica, ReplicaPool
from paceline.rollout.router.queue import SampleKey, SampleQueue
from paceline.rollout.router.settings import OpenReplica, RouterSettings
from paceline.types import Sample

_STEP_WAIT_S = 0.5


class ReplicaRouter:
    """`RolloutEngine` and `StreamingEngine` over several replicas; see the module's docstring."""

    def __init__(
        self, settings: RouterSettings, open_replica: OpenReplica, flops: GenerationFlops | None = None
    ) -> None:
        self.weight_version = 0
        self._flops = flops
        self._news = threading.Event()
        self._queue = SampleQueue()
        self._balancer = Balancer(settings.affinity_margin, settings.max_queued)
        self._pool = ReplicaPool(settings, open_replica, self._news.set, self._lost, self._balancer.add)
        self._counts: Counter[str] = Counter()
        self._stats = RolloutStats()
        for name, _ in self._pool:
            self._balancer.add(name)

    # --- what a run may ask ---

    @property
    def replicas(self) -> dict[str, Replica]:
        """Replicas that take samples, by name."""
        return {name: held.replica for name, held in self._pool}

    @property
    def facts(self) -> dict[str, object]:
        """What the first replica said of itself."""
        return next((replica.facts for replica in self.replicas.values()), {})

    @property
    def deaths(self) -> tuple[str, ...]:
        """What each replica that died since the start died of."""
        return self._pool.deaths

    @property
    def has_work(self) -> bool:
        """Whether any sample has not ended."""
        return bool(self._queue)

    @property
    def num_waiting(self) -> int:
        """Samples in the global queue."""
        return self._queue.num_waiting

    @property
    def stats(self) -> RolloutStats:
        """Counts of the last `generate`, summed over replicas."""
        return self._stats

    # --- samples: in, out to the replicas, and back ---

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int:
        """See `StreamingEngine.submit`: the samples join the end of the queue."""
        return self._queue.add(request, params)

    def step(self, timeout_s: float = _STEP_WAIT_S) -> list[SampleEvent]:
        """Hands out what fits, and returns what replicas have added, waiting at most `timeout_s` for it.

        Raises:
            ReplicaDiedError: a replica died and none is left; the message names it, the stage and the cause.
        """
        events: list[SampleEvent] = []
        self._pool.adopt_started()
        self._hand_out()
        until = time.monotonic() + timeout_s
        while not events:
            self._news.clear()
            for name, held in self._pool:
                events += self._news_of(name, held)
            if events or time.monotonic() >= until or not self._queue:
                break
            self._news.wait(max(0.0, min(until - time.monotonic(), _STEP_WAIT_S)))
            self._pool.adopt_started()
            self._hand_out()
        self._hand_out()
        return events

    def _hand_out(self) -> None:
        """Takes samples from the head of the queue while replicas have room, then sends them, group by group."""
        now = time.monotonic()
        full = frozenset(name for name, held in self._pool if held.refused_until > now)
        parts: dict[tuple[str, int], list[SampleKey]] = {}
        while (head := self._queue.head) is not None:
            name = self._balancer.acquire(head.request.prompt.token_ids, full)
            if name is None:
                break
            sample = self._queue.pop()
            parts.setdefault((name, sample.request_id), []).append(sample)
        for (name, request_id), samples in parts.items():
            self._send(name, request_id, tuple(samples))

    def _send(self, name: str, request_id: int, samples: tuple[SampleKey, ...]) -> None:
        """Gives a replica samples of one request, as a request of its own."""
        held, opened = self._pool.get(name), self._queue.request(request_id)
        if held is None or opened is None:  # it died while this was being handed out
            self._queue.put_back(samples)
            return
        held.pending.update(samples)
        try:
            local_id = held.replica.submit(opened.part(samples), opened.params)
        except ReplicaRefusedError as error:
            held.pending.difference_update(samples)
            for _ in samples:
                self._balancer.release(name)
            self._queue.put_back(sorted(samples))
            self._counts.update(num_refusals=1)
            self._pool.pause(name, error)
        except ReplicaDiedError as error:
            self._pool.bury(name, error)
        else:
            held.requests[local_id], held.refusing_since = samples, None

    def _news_of(self, name: str, held: HeldReplica) -> list[SampleEvent]:
        try:
            news = held.replica.step(0.0)
        except ReplicaDiedError as error:
            self._pool.bury(name, error)
            return []
        return self._own_events(name, held, news)

    def _own_events(self, name: str, held: HeldReplica, news: Iterable[SampleEvent]) -> list[SampleEvent]:
        """A replica's events under our own request ids and sample indices; none of samples that have ended."""
        events = []
        for event in news:
            samples = held.requests[event.request_id]
            sample = samples[event.sample_index]
            if not self._queue.is_open(sample):
                continue
            request_id, index = sample
            finished = None
            if event.finished is not None:
                finished = replace(event.finished, sample_index=index)
                held.pending.discard(sample)
                self._balancer.release(name)
                self._queue.end(sample)
                if held.pending.isdisjoint(samples):
                    del held.requests[event.request_id]
            events.append(replace(event, request_id=request_id, sample_index=index, finished=finished))
        return events

    def _lost(self, name: str, held: HeldReplica) -> None:
        """A replica is dead: what it had not finished is done again elsewhere, before anything else."""
        self._balancer.remove(name)
        lost = sorted(held.pending)
        self._counts.update(num_dead_replicas=1, num_redone_samples=len(lost))
        self._queue.put_back(lost)

    def abort(self, request_id: int) -> list[SampleEvent]:
        """See `StreamingEngine.abort`. Samples that no replica has yet end without a token."""
        opened = self._queue.request(request_id)
        if opened is None:
            return []
        events = [
            SampleEvent(request_id, index, (), (), self._unborn(opened.request, index))
            for index in self._queue.withdraw(request_id)
        ]
        for name, held in self._pool:
            for local_id, samples in list(held.requests.items()):
                if samples[0].request_id != request_id:
                    continue
                try:
                    news = held.replica.abort(local_id)
                except ReplicaDiedError as error:
                    self._pool.bury(name, error)
                    break
                events += self._own_events(name, held, news)
        if (
            self._queue.request(request_id) is not None
        ):  # on a replica that died just now: nothing of it is left
            return events + self.abort(request_id)
        return events

    def _unborn(self, request: RolloutRequest, index: int) -> Sample:
        """A sample that was aborted before any replica had it: its prefix, or nothing."""
        prefix = request.prefixes[index] if request.prefixes else None
        if prefix is not None:
            return replace(prefix, sample_index=index, finish_reason="abort")
        return Sample(
            prompt_id=request.prompt.prompt_id,
            sample_index=index,
            token_ids=(),
            logprobs=(),
            loss_mask=(),
            finish_reason="abort",
            weight_version=self.weight_version,
            seed=request.seeds[index],
            text="",
        )

    # --- whole rollouts ---

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """See `RolloutEngine.generate`."""
        counted: dict[str, Replica] = {}
        for name, held in self._pool:
            try:
                held.replica.begin_stats()
            except ReplicaDiedError as error:
                self._pool.bury(name, error)
            else:
                counted[name] = held.replica
        groups = generate_by_steps(self, requests, params, on_sample)
        self._stats = self._summed(counted, requests, groups)
        self._counts.clear()  # deaths from here on, while loading weights say, belong to the next
        return groups

    def _summed(
        self,
        counted: dict[str, Replica],
        requests: Sequence[RolloutRequest],
        groups: Sequence[Sequence[Sample]],
    ) -> RolloutStats:
        """Counts of all replicas; what a replica did before it died is lost, its samples are not."""
        total = RolloutStats()
        for name, before in counted.items():
            if (held := self._pool.get(name)) is None or held.replica is not before:
                continue
            try:
                before.end_stats((), ())
            except ReplicaDiedError as error:  # nothing was left to do: its samples are all here
                self._pool.bury(name, error)
                continue
            total += before.stats
        flops = 0.0 if self._flops is None else self._flops(requests, groups)
        tokens = sum(len(sample.token_ids) for group in groups for sample in group)
        return replace(total, num_generated_tokens=tokens, flops=flops, **self._counts)

    # --- all replicas together ---

    def wait_ready(self) -> None:
        """See `ReplicaPool.wait_ready`."""
        self._pool.wait_ready()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `ReplicaPool.load_weights`; where it raises, the router keeps its old version."""
        self._pool.load_weights(weights, version)
        self.weight_version = version
        self._balancer.forget_prompts()

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs of prompts from every replica, averaged nowhere: those of the replica that is furthest from the
        first. None where replicas cannot say."""
        known = [one for one in self._pool.score(prompts) if one is not None]
        return max(known, key=lambda one: _distance(one, known[0]), default=None)

    def sleep(self) -> None:
        """See `ReplicaPool.sleep`."""
        self._pool.sleep()

    def wake(self) -> None:
        """See `ReplicaPool.wake`."""
        self._pool.wake()

    def kill(self) -> None:
        """Ends all replicas at once."""
        self._pool.kill()

    def close(self) -> None:
        """Lets all replicas leave."""
        self._pool.close()


def _distance(one: list[list[float]], other: list[list[float]]) -> float:
    """Sum of absolute differences of two sets of log-probs."""
    return sum(
        abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )
