"""A rollout engine in a process of its own: both engine protocols over one child, and weights by file."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from paceline.rollout.driving import generate_by_steps
from paceline.rollout.errors import ReplicaDiedError
from paceline.rollout.protocol import (
    OnSample,
    RolloutRequest,
    RolloutStats,
    SampleEvent,
    SamplingParams,
)
from paceline.rollout.remote.assembly import Decoder, OpenRequest, submit_order
from paceline.rollout.remote.weight_files import BY_FILE, Offer, WeightTransfer, offered
from paceline.rollout.replica import GenerationFlops, Published, check_loaded
from paceline.sync.fingerprint import fingerprint
from paceline.types import Sample


class EngineLink(Protocol):
    """An engine's process, or a server, as the run sees it: `EngineChild`, `ServerLink`."""

    facts: dict[str, Any] | None

    @property
    def pid(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def silent_s(self) -> float: ...
    def poll_ready(self) -> bool: ...
    def wait_ready(self, timeout_s: float) -> dict[str, Any]: ...
    def send(self, order: dict[str, Any]) -> None: ...
    def take(self, timeout_s: float = 0.0) -> list[tuple[int, list[Any]]]: ...
    def begin_call(self, name: str, **arguments: Any) -> int: ...
    def end_call(self, number: int, what: str, timeout_s: float, stage: str = "rollout") -> Any: ...
    def call(self, name: str, timeout_s: float, stage: str = "rollout", **arguments: Any) -> Any: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


OpenLink = Callable[[Callable[[], None]], EngineLink]
"""Starts the process; its argument is called whenever something has arrived from it."""

_STEP_WAIT_S = 0.5
"""How long `step` waits for news before it returns none."""


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Seconds to start, and seconds without a sign of life while there is work or an order is unanswered."""

    start_s: float
    silent_s: float
    transfer: WeightTransfer = BY_FILE


class RemoteEngine:
    """`RolloutEngine` and `StreamingEngine` over an engine's process, and a `Replica` for a router.

    It starts with the constructor and is waited for by `wait_ready`, so that several start side by side. Samples of a
    dead process are lost with it (`ReplicaDiedError`); a router does them again elsewhere.
    """

    def __init__(
        self,
        name: str,
        open_child: OpenLink,
        decoder: Decoder,
        limits: RemoteLimits,
        flops: GenerationFlops | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.weight_version = name, 0
        self._decoder, self._limits, self._flops = decoder, limits, flops
        self._child = open_child(notify)
        self._open: dict[int, OpenRequest] = {}
        self._next_id = 0
        self._is_asleep = self._has_weights = False
        self._stats = RolloutStats()
        self._counted: dict[str, float] = {}

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.pid

    @property
    def facts(self) -> dict[str, object]:
        """What the engine said of itself when it was ready: versions, device, whether it takes seeds."""
        return dict(self._child.facts or {})

    def wait_ready(self) -> None:
        """Waits for the process to serve. Raises `ReplicaDiedError` where it does not."""
        self._child.wait_ready(self._limits.start_s)

    @property
    def is_ready(self) -> bool:
        """Whether the process serves, or has ended."""
        return self._child.poll_ready()

    @property
    def has_work(self) -> bool:
        """Whether any sample has not ended."""
        return bool(self._open)

    @property
    def num_open_samples(self) -> int:
        """Samples that have not ended."""
        return sum(len(request.open_samples) for request in self._open.values())

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int:
        """See `StreamingEngine.submit`. An engine that sleeps is woken: it would never answer."""
        self.wait_ready()
        if self._is_asleep:
            self.wake()
        self._check(request)
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._child.send(submit_order(request_id, request, params))
        self._open[request_id] = OpenRequest(request_id, request, self._decoder)
        return request_id

    def _check(self, request: RolloutRequest) -> None:
        if self.facts.get("needs_weights") and not self._has_weights:
            raise RuntimeError(f"rollout engine {self.name} has random weights: nothing has been loaded")
        limit = self.facts.get("max_model_len")
        total = len(request.prompt.token_ids) + request.max_new_tokens
        if isinstance(limit, int) and total > limit:
            raise ValueError(
                f"prompt {request.prompt.prompt_id}: {len(request.prompt.token_ids)} + {request.max_new_tokens} tokens "
                f"exceed the engine's context of {limit}"
            )

    def step(self, timeout_s: float = _STEP_WAIT_S) -> list[SampleEvent]:
        """What has arrived, waiting at most `timeout_s` for it.

        Raises:
            ReplicaDiedError: the process is gone, or has been silent for too long with work to do.
        """
        events = []
        for version, (request_id, index, tokens, logprobs, finish) in self._child.take(timeout_s):
            request = self._open.get(request_id)
            event = None if request is None else request.extend(index, tokens, logprobs, finish, version)
            if request is None or event is None:
                continue  # aborted here while the child was still at it
            if not request.open_samples:
                del self._open[request_id]
            events.append(event)
        if not events and self._open and self._child.silent_s > self._limits.silent_s:
            self.kill()
            raise ReplicaDiedError(self.name, f"silent for {self._limits.silent_s:.0f} s with work to do")
        return events

    def abort(self, request_id: int) -> list[SampleEvent]:
        """Ends a request's unfinished samples; their tokens so far come with the events. See `StreamingEngine`."""
        if request_id not in self._open:
            return []
        self._child.send({"order": "abort", "id": request_id})
        events: list[SampleEvent] = []
        until = time.monotonic() + self._limits.silent_s
        while request_id in self._open:
            events += self.step()
            if time.monotonic() > until:
                raise ReplicaDiedError(self.name, "no answer to an abort")
        return events

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """See `RolloutEngine.generate`."""
        self.begin_stats()
        groups = generate_by_steps(self, requests, params, on_sample)
        self.end_stats(requests, groups)
        return groups

    def begin_stats(self) -> None:
        """Counts from here on."""
        self.wait_ready()
        self._counted = self._child.call("stats", self._limits.silent_s)

    def end_stats(self, requests: Sequence[RolloutRequest], groups: Sequence[Sequence[Sample]]) -> None:
        """Takes the counts since `begin_stats` for those of these samples."""
        now = self._child.call("stats", self._limits.silent_s)
        counts = {name: value - self._counted.get(name, 0) for name, value in now.items()}
        counts["cache_bytes"], counts["num_slots"] = now["cache_bytes"], now["num_slots"]
        flops = 0.0 if self._flops is None else self._flops(requests, groups)
        whole = {name: int(value) for name, value in counts.items()}
        self._stats = replace(RolloutStats(), **whole, flops=flops)

    @property
    def stats(self) -> RolloutStats:
        """Counts of the last `generate`."""
        return self._stats

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Loads weights by file, compares fingerprints and empties the prefix cache.

        Raises:
            WeightSyncError: what arrived or what the engine holds is not what was sent; the version stays.
            ReplicaDiedError: the process is gone.
        """
        held = list(weights)
        published = Published(version, fingerprint(held))
        with offered(held, self._limits.transfer) as offer:
            self.end_load(self.begin_load(offer, published), published)

    def begin_load(self, offer: Offer, published: Published) -> int:
        """Orders the load of `published`; several replicas load side by side."""
        self.wait_ready()
        return self._child.begin_call(offer.call, **offer.arguments, version=published.version)

    def end_load(self, call: int, published: Published) -> None:
        """Waits for `begin_load` and checks it; see `load_weights`."""
        answer = self._child.end_call(call, "load weights", self._limits.silent_s, "sync")
        check_loaded(self.name, published, answer)
        self.weight_version, self._has_weights = published.version, True
        if answer.get("is_awake", True):
            self._is_asleep = False

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs at temperature 1 of every token of each prompt given those before it, the first one left out; None
        where the engine offers no scoring."""
        self.wait_ready()
        if not self.facts.get("scores", False):
            return None
        if self._is_asleep:
            self.wake()
        found: list[list[float]] = self._child.call(
            "score", self._limits.silent_s, prompts=[list(tokens) for tokens in prompts]
        )
        return found

    def sleep(self) -> None:
        """Gives memory back as far as the engine can; the next request, load or `wake` takes it again."""
        if self._is_asleep or not self._child.is_ready:
            return
        self._child.call("sleep", self._limits.silent_s)
        self._is_asleep = True

    def wake(self) -> None:
        """Takes the memory again.

        Raises:
            ReplicaRefusedError: it could not; what it had taken half-way is released, and `wake` may be tried again.
        """
        if not self._is_asleep:
            return
        self._child.call("wake", self._limits.silent_s)
        self._is_asleep = False

    def kill(self) -> None:
        """Ends the process at once."""
        self._child.kill()

    def close(self) -> None:
        """Lets the process leave."""
        self._child.close()
