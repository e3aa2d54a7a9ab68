"""One HTTP request's choices: from the engine's events to text, tokens and log-probs."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from paceline.rollout import RolloutRequest, SampleEvent, SamplingParams
from paceline.serve.engine_loop import EngineLoop, Listener, Ticket
from paceline.serve.sessions import Turn
from paceline.serve.text import TextStream
from paceline.types import FinishReason, Prompt


@dataclass(slots=True)
class Choice:
    """One answer so far."""

    index: int
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def turn(self) -> Turn:
        """The finished answer."""
        assert self.finish_reason is not None
        return Turn(
            tuple(self.token_ids), tuple(self.logprobs), tuple(self.versions), self.finish_reason, self.text
        )


@dataclass(frozen=True, slots=True)
class Update:
    """What a round brought to one choice."""

    choice: Choice
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt with the seeds of its choices, numbered from `first_index`."""

    prompt: Prompt
    seeds: tuple[int, ...]
    limit: int
    first_index: int = 0


class Generation:
    """Choices of one HTTP request. Use as a context: leaving it ends whatever still runs."""

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        stop_strings: Sequence[str],
        works: Sequence[Work],
    ) -> None:
        self._loop, self._params, self._stops = loop, params, tuple(stop_strings)
        self._works = works
        self._arrived: asyncio.Queue[tuple[int, SampleEvent | Exception, int]] = asyncio.Queue()
        self._tickets: dict[int, Ticket] = {}
        num_choices = sum(len(work.seeds) for work in works)
        self.choices = [Choice(index, TextStream(tokenizer, stop_strings)) for index in range(num_choices)]

    def __enter__(self) -> "Generation":
        for work in self._works:
            # a stop text ends one choice, and the engine ends whole requests
            parts = [(seed,) for seed in work.seeds] if self._stops else [work.seeds]
            index = work.first_index
            for seeds in parts:
                request = RolloutRequest(work.prompt, seeds, work.limit)
                ticket = self._loop.start(request, self._params, self._listener(index))
                self._tickets |= dict.fromkeys(range(index, index + len(seeds)), ticket)
                index += len(seeds)
        return self

    def __exit__(self, *_: object) -> None:
        for choice in self.choices:
            if choice.finish_reason is None and choice.index in self._tickets:
                self._loop.cancel(self._tickets[choice.index])

    async def updates(self) -> AsyncIterator[Update]:
        """What comes, until every choice has ended. Raises what the engine raised."""
        while any(choice.finish_reason is None for choice in self.choices):
            first_index, event, version = await self._arrived.get()
            if isinstance(event, Exception):
                raise event
            choice = self.choices[first_index + event.sample_index]
            if choice.finish_reason is None:
                yield self._update(choice, event, version)

    async def finished(self) -> list[Choice]:
        """All choices once they have ended."""
        async for _ in self.updates():
            pass
        return self.choices

    def _update(self, choice: Choice, event: SampleEvent, version: int) -> Update:
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        choice.versions += [version] * len(event.token_ids)
        text = choice.stream.add(event.token_ids)
        if event.finished is not None:
            text += choice.stream.finish()
            choice.finish_reason = event.finished.finish_reason
        if choice.stream.is_stopped:
            choice.finish_reason = "stop"
            if event.finished is None:
                self._loop.cancel(self._tickets[choice.index])
        choice.text += text
        return Update(choice, text, event.token_ids, event.logprobs)

    def _listener(self, first_index: int) -> Listener:
        loop, queue = asyncio.get_running_loop(), self._arrived

        def hear(event: SampleEvent | Exception) -> None:
            # called by the engine's thread right after the round, so this is the version that sampled
            loop.call_soon_threadsafe(queue.put_nowait, (first_index, event, self._loop.weight_version))

        return hear
