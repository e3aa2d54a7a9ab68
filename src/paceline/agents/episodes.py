"""Multi-turn episodes on a streaming engine: the model answers, its calls are run, their output is put behind the
answer, and it goes on.

An episode is one sample that is resumed: its tokens so far are the prefix of its next turn, so nothing is tokenised
again, the seed's positions go on, and masks and log-probs stay. Tools run in other processes while the engine decodes
other episodes; only when nothing is left to decode does the rank wait, and that time is stage `tools`.

Who waits for what: the loop waits for the first tool to end when the engine has no work, and is released by it, or by
its timeout.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from paceline.agents.calls import CallFormat, MalformedCall, ToolCall, parse_calls
from paceline.agents.counts import AgentCounts
from paceline.agents.tools import ToolPool
from paceline.data.turns import TurnRenderer
from paceline.rewards.pool import PendingScore
from paceline.rollout.protocol import OnSample, RolloutRequest, SampleEvent, SamplingParams
from paceline.telemetry.ledger import Ledger
from paceline.types import FinishReason, Sample


class EpisodeEngine(Protocol):
    """What episodes need of an engine: rounds, and a `generate` that begins its counts anew."""

    weight_version: int

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int:
        """See `StreamingEngine`."""
        ...

    def step(self) -> list[SampleEvent]:
        """See `StreamingEngine`."""
        ...

    def abort(self, request_id: int) -> list[SampleEvent]:
        """See `StreamingEngine`."""
        ...

    @property
    def has_work(self) -> bool:
        """See `StreamingEngine`."""
        ...

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """See `RolloutEngine`."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """See section `agent`; tokens and turns."""

    max_turns: int
    max_turn_tokens: int | None
    max_output_tokens: int


@dataclass(slots=True)
class _Episode:
    """One sample under way. `outputs[i]` is what call `i` of the last turn gave, None while it runs."""

    request_index: int
    sample_index: int
    seed: int
    sample: Sample | None = None
    num_turns: int = 0
    outputs: list[str | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens before the present turn."""
        return 0 if self.sample is None else len(self.sample.token_ids)


class EpisodeLoop:
    """Plays whole batches of episodes; see the module's docstring. `counts` are those of the last `generate`."""

    def __init__(
        self,
        engine: EpisodeEngine,
        tokenizer: PreTrainedTokenizerBase,
        renderer: TurnRenderer,
        pool: ToolPool,
        parameters: dict[str, list[str]],
        call_format: CallFormat,
        output_role: str,
        limits: EpisodeLimits,
        ledger: Ledger,
    ) -> None:
        self.counts = AgentCounts()
        self._engine, self._tokenizer, self._renderer = engine, tokenizer, renderer
        self._pool, self._parameters, self._format = pool, parameters, call_format
        self._role, self._limits, self._ledger = output_role, limits, ledger
        self._active: dict[int, dict[int, _Episode]] = {}
        self._calls: dict[PendingScore, tuple[_Episode, int]] = {}

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """One episode per seed, by request and in order of the seeds. `max_new_tokens` bounds an episode.

        Raises:
            ValueError: a request does not fit the engine.
        """
        self.counts = AgentCounts()
        self._engine.generate((), params)  # counts begin anew
        self._requests, self._params, self._on_sample = requests, params, on_sample
        self._finished: dict[tuple[int, int], Sample] = {}
        try:
            for index, request in enumerate(requests):
                episodes = [_Episode(index, i, seed) for i, seed in enumerate(request.seeds)]
                limit = self._turn_limit(request, 0)
                self._submit(replace(request, max_new_tokens=limit), episodes)
            while self._active or self._calls:
                self._round()
        finally:
            for request_id in list(self._active):  # nothing, unless an error ended the loop
                self._engine.abort(request_id)
            self._active.clear()
            self._calls.clear()
        return [
            tuple(self._finished[index, sample] for sample in range(len(request.seeds)))
            for index, request in enumerate(requests)
        ]

    def close(self) -> None:
        """Ends the tools' processes."""
        self._pool.close()

    def _round(self) -> None:
        for event in self._engine.step():
            if event.finished is not None:
                episode = self._active[event.request_id].pop(event.sample_index)
                if not self._active[event.request_id]:
                    del self._active[event.request_id]
                self._turn_ended(episode, event.finished)
        if not self._active and self._calls:
            with self._ledger.span("tools", "waiting for tools", cause="queue"):
                wait(self._calls, return_when=FIRST_COMPLETED)
        for call in [call for call in self._calls if call.done()]:
            self._call_ended(call)

    def _submit(self, request: RolloutRequest, episodes: Sequence[_Episode]) -> None:
        request_id = self._engine.submit(request, self._params)
        self._active[request_id] = dict(enumerate(episodes))

    def _turn_limit(self, request: RolloutRequest, num_tokens: int) -> int:
        turn = self._limits.max_turn_tokens
        return request.max_new_tokens if turn is None else min(request.max_new_tokens, num_tokens + turn)

    def _turn_ended(self, episode: _Episode, sample: Sample) -> None:
        answer = sample.token_ids[episode.num_tokens :]
        episode.sample = replace(sample, sample_index=episode.sample_index)
        episode.num_turns += 1
        self.counts.num_turns += 1
        if sample.finish_reason != "stop":  # the limit of the turn or of the episode
            return self._finish(episode, sample.finish_reason)
        text = str(self._tokenizer.decode(list(answer), skip_special_tokens=True))
        calls = parse_calls(text, self._format, self._parameters)
        if not calls:
            return self._finish(episode, "stop")
        if episode.num_turns >= self._limits.max_turns:
            self.counts.num_out_of_turns += 1
            return self._finish(episode, "length")
        self._start_calls(episode, calls)

    def _start_calls(self, episode: _Episode, calls: Sequence[ToolCall | MalformedCall]) -> None:
        episode.outputs = [None] * len(calls)
        self.counts.num_calls += len(calls)
        for index, call in enumerate(calls):
            if isinstance(call, MalformedCall):
                self.counts.num_malformed += 1
                episode.outputs[index] = f"Error: {call.reason}"
            else:
                self._calls[self._pool.submit(call)] = episode, index
        if None not in episode.outputs:
            self._continue(episode)

    def _call_ended(self, call: PendingScore) -> None:
        episode, index = self._calls.pop(call)
        verdict = call.result()
        self.counts.num_errors += verdict.outcome == "error"
        self.counts.num_timeouts += verdict.outcome == "timeout"
        self.counts.tool_s += verdict.seconds
        episode.outputs[index] = self._pool.output(verdict)
        if None not in episode.outputs:
            self._continue(episode)

    def _continue(self, episode: _Episode) -> None:
        """The next turn, behind the outputs; the episode ends where they leave no room for one more token."""
        sample, request = episode.sample, self._requests[episode.request_index]
        assert sample is not None
        messages = [{"role": self._role, "content": self._cut(output or "")} for output in episode.outputs]
        inserted = self._renderer.continuation(sample.token_ids, messages)
        num_tokens = len(sample.token_ids) + len(inserted)
        if num_tokens >= request.max_new_tokens:
            self.counts.num_out_of_room += 1
            return self._finish(episode, "length")
        self.counts.num_inserted_tokens += len(inserted)
        episode.sample = prefix = with_inserted(sample, inserted, self._engine.weight_version)
        again = RolloutRequest(
            request.prompt, (episode.seed,), self._turn_limit(request, num_tokens), (prefix,)
        )
        self._submit(again, [episode])

    def _cut(self, output: str) -> str:
        """A tool's output, at most so long."""
        ids = self._tokenizer(output, add_special_tokens=False)["input_ids"]
        if len(ids) <= self._limits.max_output_tokens:
            return output
        self.counts.num_outputs_cut += 1
        return str(self._tokenizer.decode(ids[: self._limits.max_output_tokens]))

    def _finish(self, episode: _Episode, reason: FinishReason) -> None:
        assert episode.sample is not None
        sample = replace(episode.sample, finish_reason=reason)
        self.counts.num_episodes += 1
        self._finished[episode.request_index, episode.sample_index] = sample
        if self._on_sample is not None:
            self._on_sample(episode.request_index, sample)


def with_inserted(sample: Sample, token_ids: Sequence[int], version: int) -> Sample:
    """A sample to go on from, with tokens behind it that the policy did not choose: loss mask 0, log-prob 0."""
    versions = sample.token_versions or (sample.weight_version,) * len(sample.token_ids)
    versions = (*versions, *(version,) * len(token_ids))
    return replace(
        sample,
        token_ids=(*sample.token_ids, *token_ids),
        logprobs=(*sample.logprobs, *(0.0,) * len(token_ids)),
        loss_mask=(*sample.loss_mask, *(0,) * len(token_ids)),
        token_versions=versions if len(set(versions)) > 1 else (),
        finish_reason="abort",
    )


def last_answer(sample: Sample) -> tuple[int, ...]:
    """Token ids of an episode's last answer."""
    masks = sample.loss_mask
    begin = len(masks) - next((n for n, mask in enumerate(reversed(masks)) if not mask), len(masks))
    return sample.token_ids[begin:]
