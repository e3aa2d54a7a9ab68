"""One queue in front of several rollout engines.

Samples wait in one global queue and are handed out one by one (`balance.py`), consecutive ones of a group as one
request. A replica that dies loses nothing: its unfinished samples go back to the head of the queue, and whatever it may
still have sent is not looked at, so nothing comes twice. It is started anew, with the weights of the last load, as long
as `max_restarts` allows; with no replica left the run ends and says which died of what.

Everything happens in the caller's thread, inside `step`; replicas' threads only wake it.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from paceline.rollout.driving import generate_by_steps
from paceline.rollout.errors import ReplicaDiedError, ReplicaError, ReplicaRefusedError
from paceline.rollout.protocol import OnSample, RolloutRequest, RolloutStats, SampleEvent, SamplingParams
from paceline.rollout.remote.weight_files import Offer, offered
from paceline.rollout.replica import GenerationFlops, Published, Replica
from paceline.rollout.router.balance import Balancer
from paceline.rollout.router.state import (
    HeldReplica,
    OpenReplica,
    OpenSamples,
    RouterSettings,
    SampleKey,
    distance,
)
from paceline.sync.fingerprint import fingerprint
from paceline.types import Sample

_STEP_WAIT_S = 0.5
_REFUSAL_PAUSE_S = 1.0


class ReplicaRouter:
    """`RolloutEngine` and `StreamingEngine` over several replicas; see the module's docstring."""

    def __init__(
        self, settings: RouterSettings, open_replica: OpenReplica, flops: GenerationFlops | None = None
    ) -> None:
        self.weight_version = 0
        self._settings, self._open_replica, self._flops = settings, open_replica, flops
        self._news = threading.Event()
        self._balancer = Balancer(settings.affinity_margin, settings.max_queued)
        self._open: dict[int, OpenSamples] = {}
        self._queue: deque[SampleKey] = deque()
        self._next_id = self._num_restarts = 0
        self._counts: Counter[str] = Counter()
        self._stats = RolloutStats()
        self._files = ExitStack()
        self._offer: Offer | None = None
        self._published: Published | None = None
        self._starting: dict[str, Replica] = {}
        self._deaths: list[str] = []
        self._held = {
            name: HeldReplica(open_replica(name, self._news.set))
            for name in map(str, range(settings.num_replicas))
        }
        for name in self._held:
            self._balancer.add(name)

    @property
    def replicas(self) -> dict[str, Replica]:
        """Replicas that take samples, by name."""
        return {name: held.replica for name, held in self._held.items()}

    def wait_ready(self) -> None:
        """Waits for all replicas: they start side by side. One that cannot start ends them all."""
        try:
            for held in self._held.values():
                held.replica.wait_ready()
        except ReplicaError:
            self.kill()
            raise

    @property
    def has_work(self) -> bool:
        """Whether any sample has not ended."""
        return bool(self._open)

    @property
    def num_waiting(self) -> int:
        """Samples in the global queue."""
        return len(self._queue)

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int:
        """See `StreamingEngine.submit`: the samples join the end of the queue."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        indices = range(len(request.seeds))
        self._open[request_id] = OpenSamples(request, params, set(indices))
        self._queue.extend(SampleKey(request_id, index) for index in indices)
        return request_id

    def step(self, timeout_s: float = _STEP_WAIT_S) -> list[SampleEvent]:
        """Hands out what fits, and returns what replicas have added, waiting at most `timeout_s` for it.

        Raises:
            ReplicaDiedError: a replica died and none is left; the message names it, the stage and the cause.
        """
        events: list[SampleEvent] = []
        self._adopt_started()
        self._hand_out()
        until = time.monotonic() + timeout_s
        while not events:
            self._news.clear()
            for name in list(self._held):
                events += self._news_of(name)
            if events or time.monotonic() >= until or not self._open:
                break
            self._news.wait(max(0.0, min(until - time.monotonic(), _STEP_WAIT_S)))
            self._adopt_started()
            self._hand_out()
        self._hand_out()
        return events

    # --- handing out ---

    def _hand_out(self) -> None:
        """Takes samples from the head of the queue while replicas have room, then sends them, group by group."""
        now = time.monotonic()
        full = frozenset(name for name, held in self._held.items() if held.refused_until > now)
        parts: dict[tuple[str, int], list[SampleKey]] = {}
        while self._queue:
            first = self._queue[0]
            prompt = self._open[first.request_id].request.prompt.token_ids
            name = self._balancer.acquire(prompt, full)
            if name is None:
                break
            parts.setdefault((name, first.request_id), []).append(self._queue.popleft())
        for (name, request_id), samples in parts.items():
            self._send(name, request_id, tuple(samples))

    def _send(self, name: str, request_id: int, samples: tuple[SampleKey, ...]) -> None:
        """Gives a replica samples of one request, as a request of its own."""
        held = self._held.get(name)
        if held is None:  # it died while this was being handed out
            self._requeue(samples)
            return
        opened = self._open[request_id]
        request = opened.request
        part = replace(
            request,
            seeds=tuple(request.seeds[sample.sample_index] for sample in samples),
            prefixes=tuple(request.prefixes[sample.sample_index] for sample in samples)
            if request.prefixes
            else (),
        )
        held.pending.update(samples)
        try:
            local_id = held.replica.submit(part, opened.params)
        except ReplicaRefusedError:
            held.pending.difference_update(samples)
            held.refused_until = time.monotonic() + _REFUSAL_PAUSE_S
            for _ in samples:
                self._balancer.release(name)
            self._requeue(sorted(samples))
        except ReplicaDiedError as error:
            self._bury(name, error)
        else:
            held.requests[local_id] = samples

    def _requeue(self, samples: Sequence[SampleKey]) -> None:
        """Puts those that have not ended back at the head of the queue, in their order."""
        self._queue.extendleft(sample for sample in reversed(samples) if self._is_open(sample))

    def _is_open(self, sample: SampleKey) -> bool:
        opened = self._open.get(sample.request_id)
        return opened is not None and sample.sample_index in opened.open

    # --- what comes back ---

    def _news_of(self, name: str) -> list[SampleEvent]:
        held = self._held[name]
        try:
            news = held.replica.step(0.0)
        except ReplicaDiedError as error:
            self._bury(name, error)
            return []
        return self._own_events(name, held, news)

    def _own_events(self, name: str, held: HeldReplica, news: Iterable[SampleEvent]) -> list[SampleEvent]:
        """A replica's events under our own request ids and sample indices; those of samples that have ended are not
        looked at."""
        events: list[SampleEvent] = []
        for event in news:
            sample = held.requests[event.request_id][event.sample_index]
            if not self._is_open(sample):
                continue
            request_id, index = sample
            finished = None
            if event.finished is not None:
                finished = replace(event.finished, sample_index=index)
                self._close_sample(name, held, sample)
            events.append(replace(event, request_id=request_id, sample_index=index, finished=finished))
        return events

    def _close_sample(self, name: str, held: HeldReplica, sample: SampleKey) -> None:
        held.pending.discard(sample)
        self._balancer.release(name)
        opened = self._open[sample.request_id]
        opened.open.discard(sample.sample_index)
        if not opened.open:
            del self._open[sample.request_id]

    # --- death and return ---

    def _bury(self, name: str, error: ReplicaDiedError) -> None:
        """Takes a dead replica out, puts its unfinished samples at the head of the queue and starts it anew.

        Raises:
            ReplicaDiedError: it was the last, and may not be started anew.
        """
        held = self._held.pop(name)
        held.replica.kill()
        self._balancer.remove(name)
        self._deaths.append(str(error))
        lost = sorted(held.pending)
        self._counts.update(num_dead_replicas=1, num_redone_samples=len(lost))
        self._requeue(lost)
        if self._num_restarts < self._settings.max_restarts:
            self._num_restarts += 1
            self._starting[name] = self._open_replica(name, self._news.set)
        elif not self._held and not self._starting:
            raise ReplicaDiedError(name, f"{error.cause}; no rollout worker is left", error.stage) from error

    def _adopt_started(self) -> None:
        """Replicas started anew take samples once they hold the present weights; waits only where no other is left."""
        for name, fresh in list(self._starting.items()):
            if self._held and not fresh.is_ready:
                continue
            del self._starting[name]
            try:
                fresh.wait_ready()
                if self._published is not None and self._offer is not None:
                    fresh.end_load(fresh.begin_load(self._offer, self._published), self._published)
            except ReplicaError as error:
                self._held[name] = HeldReplica(fresh)
                self._bury(name, ReplicaDiedError(name, f"started anew, and {error.cause}", error.stage))
            else:
                self._held[name] = HeldReplica(fresh)
                self._balancer.add(name)

    @property
    def deaths(self) -> tuple[str, ...]:
        """What each replica that died since the start died of."""
        return tuple(self._deaths)

    # --- the rest of the protocols ---

    def abort(self, request_id: int) -> list[SampleEvent]:
        """See `StreamingEngine.abort`. Samples that no replica has yet end without a token."""
        opened = self._open.get(request_id)
        if opened is None:
            return []
        events: list[SampleEvent] = []
        waiting = [sample.sample_index for sample in self._queue if sample.request_id == request_id]
        self._queue = deque(sample for sample in self._queue if sample.request_id != request_id)
        for index in waiting:
            events.append(SampleEvent(request_id, index, (), (), self._unborn(opened.request, index)))
            opened.open.discard(index)
        for name, held in list(self._held.items()):
            for local_id, samples in list(held.requests.items()):
                if samples[0].request_id != request_id:
                    continue
                try:
                    news = held.replica.abort(local_id)
                except ReplicaDiedError as error:
                    self._bury(name, error)
                    break
                events += self._own_events(name, held, news)
        if request_id in self._open and not opened.open:
            del self._open[request_id]
        if request_id in self._open:  # on a replica that died just now: nothing of it is left
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

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """See `RolloutEngine.generate`."""
        counted: dict[str, Replica] = {}
        for name, replica in self.replicas.items():
            try:
                replica.begin_stats()
            except ReplicaDiedError as error:
                self._bury(name, error)
            else:
                counted[name] = replica
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
            if (held := self._held.get(name)) is None or held.replica is not before:
                continue
            try:
                before.end_stats((), ())
            except ReplicaDiedError as error:  # nothing was left to do: its samples are all here
                self._bury(name, error)
                continue
            total += before.stats
        flops = 0.0 if self._flops is None else self._flops(requests, groups)
        tokens = sum(len(sample.token_ids) for group in groups for sample in group)
        return replace(total, num_generated_tokens=tokens, flops=flops, **self._counts)

    @property
    def stats(self) -> RolloutStats:
        """Counts of the last `generate`, summed over replicas."""
        return self._stats

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Loads weights into all replicas, side by side, and keeps the files for a replica that is started anew.

        Raises:
            WeightSyncError: a replica holds something else; the router keeps its old version.
            ReplicaDiedError: all replicas are dead, and none may be started anew.
        """
        held = list(weights)
        published = Published(version, fingerprint(held))
        self._files.close()  # those of the version before
        offer = self._offer = self._files.enter_context(offered(held, self._settings.transfer))
        self._published = published
        calls: dict[str, int] = {}
        for name, one in list(self._held.items()):
            try:
                calls[name] = one.replica.begin_load(offer, published)
            except ReplicaDiedError as error:
                self._bury(name, error)
        for name, call in calls.items():
            try:
                self._held[name].replica.end_load(call, published)
            except ReplicaDiedError as error:
                self._bury(name, error)
        self.weight_version = version
        self._balancer.forget_prompts()

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs of prompts from every replica, averaged nowhere: those of the replica that is furthest from the
        first. None where replicas cannot say."""
        found = [held.replica.score(prompts) for held in self._held.values()]
        known = [one for one in found if one is not None]
        return max(known, key=lambda one: distance(one, known[0]), default=None)

    @property
    def facts(self) -> dict[str, object]:
        """What the first replica said of itself."""
        return next((held.replica.facts for held in self._held.values()), {})

    def sleep(self) -> None:
        """All replicas give memory back."""
        for held in self._held.values():
            held.replica.sleep()

    def wake(self) -> None:
        """All replicas take their memory again, or none does.

        Raises:
            ReplicaError: one could not; those that had are asleep again, and `wake` may be tried again.
        """
        woken: list[Replica] = []
        for held in self._held.values():
            try:
                held.replica.wake()
            except ReplicaError:
                for one in woken:
                    one.sleep()
                raise
            woken.append(held.replica)

    def kill(self) -> None:
        """Ends all replicas at once."""
        for replica in (*self.replicas.values(), *self._starting.values()):
            replica.kill()
        self._files.close()

    def close(self) -> None:
        """Lets all replicas leave."""
        for replica in (*self.replicas.values(), *self._starting.values()):
            replica.close()
        self._files.close()
