"""Which replica gets the next sample: pure bookkeeping, no engine."""

from collections.abc import Hashable


class Balancer:
    """Unfinished samples per replica, and where each prompt was computed.

    `acquire` prefers the replica that has computed the prompt (its keys and values are there), unless that one has more
    than `affinity_margin` unfinished samples over the least busy. Otherwise the least busy; among equals the one that
    was chosen longest ago, so that idle replicas take turns.
    """

    def __init__(self, affinity_margin: int, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError("a replica must be able to hold one sample")
        self._margin, self._capacity = affinity_margin, capacity
        self._loads: dict[str, int] = {}
        self._chosen_at: dict[str, int] = {}
        self._homes: dict[Hashable, str] = {}
        self._num_choices = 0

    @property
    def loads(self) -> dict[str, int]:
        """Unfinished samples of each replica."""
        return dict(self._loads)

    def add(self, name: str) -> None:
        """A replica that can take samples."""
        self._loads[name] = 0
        self._chosen_at.setdefault(name, -1)

    def remove(self, name: str) -> None:
        """A replica that takes no more: dead, or being replaced. Prompts it has computed have no home any more."""
        self._loads.pop(name, None)
        self._homes = {prompt: home for prompt, home in self._homes.items() if home != name}

    def forget_prompts(self) -> None:
        """No replica holds keys and values of any prompt any more (new weights)."""
        self._homes.clear()

    def acquire(self, prompt: Hashable, full: frozenset[str] = frozenset()) -> str | None:
        """The replica for one sample of `prompt`, counted as its load; None while none has room.

        `full` are replicas that refuse for now: they are passed over, and block nobody.
        """
        open_to = {
            name: load
            for name, load in self._loads.items()
            if name not in full and (self._capacity is None or load < self._capacity)
        }
        if not open_to:
            return None
        least = min(open_to.values())
        home = self._homes.get(prompt)
        if home in open_to and open_to[home] - least <= self._margin:
            chosen = home
        else:
            equals = [name for name, load in open_to.items() if load == least]
            chosen = min(equals, key=self._chosen_at.__getitem__)
        self._loads[chosen] += 1
        self._num_choices += 1
        self._chosen_at[chosen] = self._num_choices
        self._homes[prompt] = chosen
        return chosen

    def release(self, name: str) -> None:
        """One sample of a replica has ended (unknown replicas are ignored: they died in between)."""
        if name in self._loads:
            self._loads[name] -= 1
