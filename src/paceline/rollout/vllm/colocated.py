"""vLLM in the trainer's own process: the same engine core as in a process of its own, and no transfer of weights.

Import this where vLLM is installed only. vLLM's memory goes to sleep while the trainer updates (`sleep_level`), and the
weight loader gets the trainer's tensors themselves.
"""

import time
from collections.abc import Callable
from typing import Any

from paceline.rollout.errors import ReplicaDiedError, ReplicaRefusedError
from paceline.rollout.foreign.frames import Message
from paceline.rollout.foreign.loop import TokenRow
from paceline.rollout.foreign.vllm_core import VllmCore


class ColocatedLink:
    """An `EngineLink` over a core in this process: a round runs inside `take`."""

    def __init__(self, name: str, arguments: Message, sleep_level: int) -> None:
        self.name, self.pid, self.silent_s = name, 0, 0.0
        self._core = VllmCore(arguments, sleep_level)
        self.facts: Message | None = self._core.facts
        self.is_ready = True
        self._rows: list[tuple[int, TokenRow]] = []
        self._answers: dict[int, Any] = {}

    def poll_ready(self) -> bool:
        """It is ready once it is there."""
        return True

    def wait_ready(self, timeout_s: float) -> Message:
        """What it said of itself."""
        assert self.facts is not None
        return self.facts

    def send(self, order: Message) -> None:
        """Obeys at once."""
        if order["order"] == "abort":
            self._rows += [(self._core.version, row) for row in self._core.abort(order["id"])]
        else:
            self._core.submit(order)

    def take(self, timeout_s: float = 0.0) -> list[tuple[int, TokenRow]]:
        """What aborts left, and one round."""
        rows, self._rows = self._rows, []
        if self._core.has_work:
            try:
                new = self._core.step()
            except RuntimeError as error:
                raise ReplicaDiedError(self.name, f"{type(error).__name__}: {error}") from error
            rows += [(self._core.version, row) for row in new]
        elif not rows:
            time.sleep(min(timeout_s, 0.01))
        return rows

    def begin_call(self, name: str, **arguments: Any) -> int:
        """Does it at once; `end_call` hands the answer over."""
        number = len(self._answers) + 1
        try:
            self._answers[number] = (True, self._core.call(name, arguments))
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            self._answers[number] = (False, error)
        return number

    def end_call(self, number: int, what: str, timeout_s: float, stage: str = "rollout") -> Any:
        """The answer of `begin_call`."""
        is_done, answer = self._answers.pop(number)
        if is_done:
            return answer
        raise ReplicaRefusedError(self.name, f"{what}: {type(answer).__name__}: {answer}", stage) from answer

    def call(self, name: str, timeout_s: float, stage: str = "rollout", **arguments: Any) -> Any:
        """`begin_call` and `end_call`."""
        return self.end_call(self.begin_call(name, **arguments), name, timeout_s, stage)

    def kill(self) -> None:
        """Nothing that could be killed alone."""

    def close(self) -> None:
        """vLLM's memory goes with the last reference to it."""
        del self._core


def open_link(name: str, arguments: Message, sleep_level: int, notify: Callable[[], None]) -> ColocatedLink:
    """vLLM, started here and now."""
    return ColocatedLink(name, arguments, sleep_level)
