"""Prompts in batches, resumable: the position that is saved is what was consumed, never what was fetched."""

from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from paceline.config.errors import ConfigError
from paceline.data.seeds import child_seed

STATE_VERSION = 1


class Loadable(Protocol):
    """What the loader needs of a prompt or row."""

    @property
    def prompt_id(self) -> str:
        """Unique, and stable across epochs and resumes."""
        ...

    @property
    def text(self) -> str:
        """Part of the fingerprint that a resume is checked against."""
        ...


P = TypeVar("P", bound=Loadable)


class PromptLoader(Generic[P]):
    """Endless stream of prompts, epoch after epoch, each epoch in its own order derived from the seed.

    A *position* counts prompts along that stream: position `p` is prompt `p % num_prompts_in_all` of epoch
    `p // num_prompts_in_all` in that epoch's order. A batch may span two epochs; a prompt then never appears twice
    in it: the second appearance is put off to the next batch.

    Raises `ConfigError` when there are no prompts or fewer than one batch takes.
    """

    def __init__(self, prompts: Sequence[P], num_prompts: int, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise ConfigError("task", 0, "there are no training prompts, so nothing could be trained")
        if num_prompts > len(prompts):
            rule = f"there are only {len(prompts)} training prompts, fewer than one batch takes"
            raise ConfigError("batch.num_prompts", num_prompts, rule, str(len(prompts)))
        self._prompts = tuple(prompts)
        if len({prompt.prompt_id for prompt in self._prompts}) != len(self._prompts):
            raise ValueError("prompt ids must be unique within the training prompts")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = self._compute_fingerprint()
        self._orders: dict[int, list[int]] = {}
        self._in_step: set[str] = set()
        self._restart(cursor=0, consumed_ahead=())

    @property
    def epoch(self) -> int:
        """Epoch (from 0) of the first prompt that is not consumed yet."""
        return self._cursor // len(self._prompts)

    @property
    def num_consumed(self) -> int:
        """Prompts consumed since the start of the run, over all epochs."""
        return self._cursor + len(self._consumed_ahead)

    @property
    def num_in_flight(self) -> int:
        """Prompts fetched and not yet consumed."""
        return sum(len(positions) for positions in self._in_flight.values())

    @property
    def fingerprint(self) -> str:
        """Of the prompts, and of the seed where it orders them."""
        return self._fingerprint

    def next_batch(self, at_most: int | None = None) -> list[P]:
        """The prompts of a new step; fewer than usual where `at_most` says so."""
        self._in_step.clear()
        return self._take(min(self._num_prompts, at_most or self._num_prompts))

    def extra(self, num_prompts: int) -> list[P]:
        """More prompts for the same step (dynamic sampling), different from the step's earlier ones.

        Only when the step has already had every prompt does one come again.
        """
        return self._take(num_prompts)

    def mark_consumed(self, prompt_ids: Iterable[str]) -> None:
        """Declares prompts done for this epoch: trained on, or dropped for good. They are not replayed on resume.

        Raises `ValueError` for a prompt that is not in flight: it would be counted twice.
        """
        for prompt_id in prompt_ids:
            positions = self._in_flight.get(prompt_id)
            if not positions:
                raise ValueError(
                    f"prompt {prompt_id!r} is marked consumed but was not fetched since it last was"
                )
            self._consumed_ahead.add(positions.popleft())
            if not positions:
                del self._in_flight[prompt_id]
        while self._cursor in self._consumed_ahead:
            self._consumed_ahead.remove(self._cursor)
            self._cursor += 1
        for finished_epoch in [epoch for epoch in self._orders if epoch < self.epoch]:
            del self._orders[finished_epoch]

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable: how far the stream is consumed without a gap, and what is consumed beyond that."""
        return {
            "version": STATE_VERSION,
            "cursor": self._cursor,
            "consumed_ahead": sorted(self._consumed_ahead),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was saved: what was fetched but not consumed then is fetched again, in order.

        Raises `ConfigError` when the prompts, their order or the seed are not those of the saved run.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(f"loader state of version {state['version']}, expected {STATE_VERSION}")
        if state["fingerprint"] != self._fingerprint:
            rule = (
                "the checkpoint was written with other training prompts, task.shuffle or run.seed; "
                "resume with the same ones, or start a new run under another run.name"
            )
            raise ConfigError("task", f"fingerprint {self._fingerprint}", rule, state["fingerprint"])
        self._restart(state["cursor"], state["consumed_ahead"])

    def _restart(self, cursor: int, consumed_ahead: Iterable[int]) -> None:
        self._cursor = cursor
        self._consumed_ahead = set(consumed_ahead)
        # Positions below `_frontier` are consumed, in flight, or put off; those from it on are untouched,
        # except for what an earlier run consumed ahead of a gap.
        self._frontier = cursor
        self._put_off: deque[int] = deque()
        self._in_flight: dict[str, deque[int]] = {}
        self._in_step.clear()

    def _take(self, num_prompts: int) -> list[P]:
        batch: list[P] = []
        for _ in range(num_prompts):
            position = self._next_position()
            prompt = self._prompt_at(position)
            self._in_step.add(prompt.prompt_id)
            self._in_flight.setdefault(prompt.prompt_id, deque()).append(position)
            batch.append(prompt)
        return batch

    def _next_position(self) -> int:
        """The earliest untaken position whose prompt the step does not have; the earliest at all if it has all."""
        for index, position in enumerate(self._put_off):
            if self._is_new(position):
                del self._put_off[index]
                return position
        if len(self._in_step) == len(self._prompts):
            return self._put_off.popleft() if self._put_off else self._advance_frontier()
        while True:
            position = self._advance_frontier()
            if self._is_new(position):
                return position
            self._put_off.append(position)

    def _is_new(self, position: int) -> bool:
        return self._prompt_at(position).prompt_id not in self._in_step

    def _advance_frontier(self) -> int:
        # What an earlier run consumed lies ahead: either still listed, or already passed by the cursor.
        self._frontier = max(self._frontier, self._cursor)
        while self._frontier in self._consumed_ahead:
            self._frontier += 1
        self._frontier += 1
        return self._frontier - 1

    def _prompt_at(self, position: int) -> P:
        epoch, offset = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[offset]]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self._prompts)))
            if self._shuffle:
                # Sorting by random() rather than shuffle(): its sequence is promised across Python versions.
                rng = Random(child_seed(self._seed, "order", epoch))
                keys = [rng.random() for _ in order]
                order.sort(key=keys.__getitem__)
            self._orders[epoch] = order
        return self._orders[epoch]

    def _compute_fingerprint(self) -> str:
        digest = blake2b(f"{self._seed if self._shuffle else None}".encode(), digest_size=8)
        for prompt in self._prompts:
            digest.update(f"\x00{prompt.prompt_id}\x00{prompt.text}".encode())
        return digest.hexdigest()
