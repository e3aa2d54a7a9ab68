"""One thread drives the engine; everybody else hands it requests and hears from it.

Who waits for what: callers never wait (`start` and `cancel` only queue). The engine's thread waits for requests while
the engine has no work, and is released by one, or by `close`. Listeners are called in the engine's thread and must not
block.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from paceline.rollout import RolloutRequest, SampleEvent, SamplingParams, StreamingEngine

Listener: TypeAlias = Callable[[SampleEvent | Exception], None]
"""Hears every event of a request, or the one error that ended it."""


class EngineClosedError(RuntimeError):
    """The engine's loop has ended; nothing can be generated any more."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way: `request_id` is the engine's once it has it."""

    request: RolloutRequest
    params: SamplingParams
    listener: Listener
    request_id: int | None = None
    is_cancelled: bool = False
    num_left: int = 0

    def __post_init__(self) -> None:
        self.num_left = len(self.request.seeds)


@dataclass(slots=True)
class LoopCounts:
    """Totals since the loop began."""

    num_requests: int = 0
    num_finished_samples: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cancelled: int = 0
    num_engine_errors: int = 0


class EngineLoop:
    """Rounds of one `StreamingEngine`. `start` and `cancel` may be called from any thread."""

    def __init__(self, engine: StreamingEngine) -> None:
        self.counts = LoopCounts()
        self._engine = engine
        self._orders: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._active: dict[int, Ticket] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def num_active(self) -> int:
        """Requests that the engine has."""
        return len(self._active)

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample now."""
        return self._engine.weight_version

    def start(self, request: RolloutRequest, params: SamplingParams, listener: Listener) -> Ticket:
        """Queues a request. Raises `EngineClosedError` after `close`."""
        ticket = Ticket(request, params, listener)
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine has been closed")
            self._orders.put(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request wherever it is, and frees what it holds; its listener hears no more. May be repeated."""
        ticket.is_cancelled = True
        self._orders.put(ticket)

    def close(self) -> None:
        """Ends all requests with `EngineClosedError` in the next round, which is the last."""
        with self._lock:
            self._is_closed = True
        self._orders.put(None)

    def give_up(self) -> None:
        """After the last round, whatever ended them: requests that still wait get `EngineClosedError`, new ones are
        refused."""
        with self._lock:
            self._is_closed = True
        while not self._orders.empty():
            ticket = self._orders.get_nowait()
            if ticket is not None and not ticket.is_cancelled:
                ticket.listener(EngineClosedError("the engine has been closed"))

    def run(self) -> None:
        """Rounds until `close`."""
        while self.round(wait_s=None):
            pass

    def round(self, wait_s: float | None = 0.0) -> bool:
        """Takes what was queued (waiting at most `wait_s` seconds for it while there is no work; None: as long as it
        takes) and does one round of the engine; False once closed."""
        if not self._take_orders(wait_s):
            for ticket in list(self._active.values()):
                self._end(ticket, EngineClosedError("the engine has been closed"))
            return False
        if not self._engine.has_work:
            return True
        try:
            events = self._engine.step()
        except Exception as error:  # of the engine: its requests end, and the next ones may work again
            self.counts.num_engine_errors += 1
            for ticket in list(self._active.values()):
                self._end(ticket, error)
            return True
        for event in events:
            self._tell(event)
        return True

    def _take_orders(self, wait_s: float | None) -> bool:
        if not self._engine.has_work and self._orders.empty():
            try:
                order = self._orders.get(timeout=wait_s) if wait_s != 0.0 else self._orders.get_nowait()
            except queue.Empty:
                return not self._is_closed
            if not self._obey(order):
                return False
        while not self._orders.empty():
            if not self._obey(self._orders.get_nowait()):
                return False
        return True

    def _obey(self, ticket: Ticket | None) -> bool:
        if ticket is None:
            return False
        if ticket.is_cancelled:
            if ticket.request_id in self._active:
                self.counts.num_cancelled += 1
                self._end(ticket, None)
        else:
            try:
                ticket.request_id = self._engine.submit(ticket.request, ticket.params)
            except ValueError as error:  # it can never fit
                ticket.listener(error)
                return True
            self._active[ticket.request_id] = ticket
            self.counts.num_requests += 1
            self.counts.num_prompt_tokens += len(ticket.request.prompt.token_ids)
        return True

    def _end(self, ticket: Ticket, error: Exception | None) -> None:
        assert ticket.request_id is not None
        self._engine.abort(ticket.request_id)
        del self._active[ticket.request_id]
        if error is not None:
            ticket.listener(error)

    def _tell(self, event: SampleEvent) -> None:
        ticket = self._active.get(event.request_id)
        self.counts.num_generated_tokens += len(event.token_ids)
        if ticket is None:
            return
        if event.finished is not None:
            self.counts.num_finished_samples += 1
            ticket.num_left -= 1
            if not ticket.num_left:
                del self._active[event.request_id]
        if not ticket.is_cancelled:
            ticket.listener(event)
