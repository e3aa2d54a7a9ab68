"""Drafts without a draft model: the tokens that followed the same few tokens before.

Looked up in what the sample itself has said, then in its prompt and in the samples drawn last time for the same prompt.
A draft decides nothing: every position is drawn from the model's own distribution with the sample's own random number,
and drafted tokens are kept as far as they are what was drawn. Samples are those of decoding one by one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.types import Sample

_LONGEST, _SHORTEST = 4, 2
"""Tokens that must agree for a draft; the longest agreement is looked for first."""

_PATIENCE = 256
"""Most rounds that pass before drafts that did not pay are tried again."""

_WEIGHT = 0.2
"""Weight of the newest round in the running means."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """`mode`: on verifies every draft, auto where that is measured to be faster. `num_tokens` of a draft at most;
    `max_running`: drafts are made while no more samples than this run and none wait; `memory_tokens`: tokens of
    earlier samples that are remembered."""

    mode: Literal["auto", "on"] = "auto"
    num_tokens: int = 8
    max_running: int = 16
    memory_tokens: int = 4_000_000


class NgramIndex:
    """Where every run of two to four tokens was last seen, and what followed."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._start = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Another text; nothing is found across its beginning."""
        self._start = len(self._tokens)
        self.extend(tokens)
        # the last tokens of a text are followed by nothing of it
        self._tokens.append(-1)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on. A run of tokens becomes known when a token follows it."""
        for token in tokens:
            at = len(self._tokens)
            for length in range(_SHORTEST, min(_LONGEST, at - self._start) + 1):
                self._after[tuple(self._tokens[at - length : at])] = at
            self._tokens.append(token)

    def following(self, run: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that followed where the run was seen last; empty when it was not."""
        at = self._after.get(run)
        if at is None:
            return ()
        found = tuple(self._tokens[at : at + count])
        return found[: found.index(-1)] if -1 in found else found


class Drafter:
    """Remembers samples by prompt, and drafts for running ones."""

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._samples: OrderedDict[str, dict[int, tuple[int, ...]]] = OrderedDict()
        self._num_tokens = 0
        self._by_prompt: dict[str, NgramIndex] = {}
        self._own: dict[tuple[int, int], tuple[NgramIndex, int]] = {}

    def remember(self, request_id: int, sample: Sample) -> None:
        """A sample has ended; it takes the place of the one drawn last time."""
        self._own.pop((request_id, sample.sample_index), None)
        known = self._samples.setdefault(sample.prompt_id, {})
        self._num_tokens += len(sample.token_ids) - len(known.get(sample.sample_index, ()))
        known[sample.sample_index] = sample.token_ids
        self._samples.move_to_end(sample.prompt_id)
        self._by_prompt.pop(sample.prompt_id, None)
        while self._num_tokens > self._settings.memory_tokens and len(self._samples) > 1:
            prompt_id, dropped = self._samples.popitem(last=False)
            self._by_prompt.pop(prompt_id, None)
            self._num_tokens -= sum(map(len, dropped.values()))

    def draft(
        self,
        request_id: int,
        sample_index: int,
        prompt_id: str,
        prompt: Sequence[int],
        tokens: Sequence[int],
        room: int,
    ) -> tuple[int, ...]:
        """At most `room` tokens that may come next; empty where nothing is known."""
        count = min(room, self._settings.num_tokens)
        if count < 1:
            return ()
        own, done = self._own.setdefault((request_id, sample_index), (NgramIndex(), 0))
        own.extend(tokens[done:])
        self._own[request_id, sample_index] = own, len(tokens)
        others = self._of_prompt(prompt_id, prompt)
        recent = (*prompt[-_LONGEST:], *tokens[-_LONGEST:])[-_LONGEST:]
        for length in range(min(_LONGEST, len(recent)), _SHORTEST - 1, -1):
            run = recent[-length:]
            if found := own.following(run, count) or others.following(run, count):
                return found
        return ()

    def _of_prompt(self, prompt_id: str, prompt: Sequence[int]) -> NgramIndex:
        if prompt_id not in self._by_prompt:
            index = NgramIndex()
            last = tuple(prompt[-_LONGEST:])
            index.add(prompt)
            for tokens in self._samples.get(prompt_id, {}).values():
                index.add((*last, *tokens))
            self._by_prompt[prompt_id] = index
        return self._by_prompt[prompt_id]


class DraftGauge:
    """Whether verifying drafts is faster than decoding one by one, from what rounds of both kinds took.

    It changes when tokens come, never which.
    """

    def __init__(self, always: bool) -> None:
        self._always = always
        self._plain_s: float | None = None
        self._token_s: float | None = None
        """Seconds per token of one sample: in plain rounds that is a round's time."""
        self._pause = self._left = 0

    @property
    def is_due(self) -> bool:
        """Whether this round should look for drafts. A few plain rounds come first, to compare with."""
        if self._always:
            return True
        return self._plain_s is not None and self._left == 0

    def plain(self, seconds: float) -> None:
        """A round without drafts, of few samples, took this long."""
        self._plain_s = _mean(self._plain_s, seconds)
        self._left = max(0, self._left - 1)

    def verified(self, seconds: float, tokens_per_sample: float) -> None:
        """A round that verified drafts took this long and brought so many tokens per sample."""
        self._token_s = _mean(self._token_s, seconds / tokens_per_sample)
        if self._plain_s is not None and self._token_s > self._plain_s:
            self.wait()
        else:
            self._pause = 0

    def wait(self) -> None:
        """Drafts did not pay, or there were none: they are looked for again after a while, longer each time."""
        self._pause = min(_PATIENCE, max(4, 2 * self._pause))
        self._left = self._pause
        self._token_s = None


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT) * before + _WEIGHT * now
