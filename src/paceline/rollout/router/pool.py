"""The replicas behind a router: those that take samples, and those that are started anew in the place of dead ones.

A replica that is started anew gets the weights of the last load, whose files are kept for it until the next.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor

from paceline.rollout.errors import ReplicaDiedError, ReplicaError, ReplicaRefusedError
from paceline.rollout.remote.weight_files import Offer, offered
from paceline.rollout.replica import Published, Replica
from paceline.rollout.router.queue import SampleKey
from paceline.rollout.router.settings import OpenReplica, RouterSettings
from paceline.sync.fingerprint import fingerprint

_REFUSAL_PAUSE_S = 1.0


@dataclass(slots=True)
class HeldReplica:
    """A replica, what it was given, and until when it takes nothing more since when (on the monotonic clock)."""

    replica: Replica
    requests: dict[int, tuple[SampleKey, ...]] = field(default_factory=dict)
    """Its own request id to the samples of that request, in its order of them, until the last has ended; all belong to
    one request of ours."""
    pending: set[SampleKey] = field(default_factory=set)
    """Those that have not ended."""
    refused_until: float = 0.0
    refusing_since: float | None = None


class ReplicaPool:
    """Iterates over the replicas that take samples, by name and in the order in which they came; what is iterated over
    is those of that moment.

    `on_death` hears of each replica that died, after it was taken out and before another is started in its place;
    `on_return` of each that was started anew and takes samples from now on.
    """

    def __init__(
        self,
        settings: RouterSettings,
        open_replica: OpenReplica,
        notify: Callable[[], None],
        on_death: Callable[[str, HeldReplica], None],
        on_return: Callable[[str], None],
    ) -> None:
        self._settings, self._open_replica, self._notify = settings, open_replica, notify
        self._on_death, self._on_return = on_death, on_return
        self._starting: dict[str, Replica] = {}
        self._num_restarts = 0
        self._deaths: list[str] = []
        self._files = ExitStack()
        self._offer: Offer | None = None
        self._published: Published | None = None
        self._held = {
            name: HeldReplica(open_replica(name, notify)) for name in map(str, range(settings.num_replicas))
        }

    def __iter__(self) -> Iterator[tuple[str, HeldReplica]]:
        return iter(list(self._held.items()))

    def get(self, name: str) -> HeldReplica | None:
        """A replica that takes samples."""
        return self._held.get(name)

    @property
    def deaths(self) -> tuple[str, ...]:
        """What each replica that died since the start died of."""
        return tuple(self._deaths)

    def wait_ready(self) -> None:
        """Waits for all replicas: they start side by side. One that cannot start ends them all."""
        try:
            for held in self._held.values():
                held.replica.wait_ready()
        except ReplicaError:
            self.kill()
            raise

    # --- refusal, death and return ---

    def pause(self, name: str, error: ReplicaRefusedError) -> None:
        """A replica has said no, for want of memory to wake up say: it is asked again in a moment. One that has said
        nothing else for too long counts as dead."""
        held, now = self._held[name], time.monotonic()
        held.refused_until = now + _REFUSAL_PAUSE_S
        if held.refusing_since is None:
            held.refusing_since = now
        if now - held.refusing_since >= self._settings.refusal_limit_s:
            cause = f"has refused work for {now - held.refusing_since:.0f} s, now with {error.cause}"
            self.bury(name, ReplicaDiedError(name, cause, error.stage))

    def bury(self, name: str, error: ReplicaDiedError) -> None:
        """Takes a dead replica out and starts it anew, as long as restarts are left.

        Raises:
            ReplicaDiedError: it was the last, and may not be started anew.
        """
        held = self._held.pop(name)
        held.replica.kill()
        self._deaths.append(str(error))
        self._on_death(name, held)
        if self._num_restarts < self._settings.max_restarts:
            self._num_restarts += 1
            self._starting[name] = self._open_replica(name, self._notify)
        elif not self._held and not self._starting:
            raise ReplicaDiedError(name, f"{error.cause}; no rollout worker is left", error.stage) from error

    def adopt_started(self) -> None:
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
                self.bury(name, ReplicaDiedError(name, f"started anew, and {error.cause}", error.stage))
            else:
                self._held[name] = HeldReplica(fresh)
                self._on_return(name)

    # --- weights and memory ---

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Loads weights into all replicas, side by side, and keeps the files for a replica that is started anew.

        Raises:
            WeightSyncError: a replica holds something else.
            ReplicaDiedError: all replicas are dead, and none may be started anew.
        """
        held = list(weights)
        published = Published(version, fingerprint(held))
        self._files.close()  # those of the version before
        offer = self._offer = self._files.enter_context(offered(held, self._settings.transfer))
        self._published = published
        calls: dict[str, int] = {}
        for name, one in self:
            try:
                calls[name] = one.replica.begin_load(offer, published)
            except ReplicaDiedError as error:
                self.bury(name, error)
        for name, call in calls.items():
            try:
                self._held[name].replica.end_load(call, published)
            except ReplicaDiedError as error:
                self.bury(name, error)

    def sleep(self) -> None:
        """All replicas give memory back; a dead one has."""
        for name, held in self:
            self._sleep(name, held)

    def _sleep(self, name: str, held: HeldReplica) -> None:
        try:
            held.replica.sleep()
        except ReplicaDiedError as error:
            self.bury(name, error)

    def wake(self) -> None:
        """All replicas take their memory again, or none does; dead ones are left out.

        Raises:
            ReplicaRefusedError: one could not; those that had are asleep again, and `wake` may be tried again.
            ReplicaDiedError: all replicas are dead, and none may be started anew.
        """
        woken: list[tuple[str, HeldReplica]] = []
        for name, held in self:
            try:
                held.replica.wake()
            except ReplicaDiedError as error:
                self.bury(name, error)
            except ReplicaError:
                for one in woken:
                    self._sleep(*one)
                raise
            else:
                woken.append((name, held))

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[list[float]] | None]:
        """What every replica says of the log-probs of prompts; at least one is asked.

        Raises:
            ReplicaDiedError: all replicas are dead, and none may be started anew.
        """
        found: list[list[list[float]] | None] = []
        while not found:
            self.adopt_started()
            for name, held in self:
                try:
                    found.append(held.replica.score(prompts))
                except ReplicaDiedError as error:
                    self.bury(name, error)
        return found

    # --- the end ---

    def kill(self) -> None:
        """Ends all replicas at once."""
        for replica in self._all():
            replica.kill()
        self._files.close()

    def close(self) -> None:
        """Lets all replicas leave."""
        for replica in self._all():
            replica.close()
        self._files.close()

    def _all(self) -> list[Replica]:
        return [*(held.replica for held in self._held.values()), *self._starting.values()]
