"""Episodes that a user's program plays through an OpenAI client: every answer it gets comes from the policy, and its
session's exact tokens become the sample.

Programs run in processes that can be killed. The HTTP server has a thread; the engine stays with the rank's own thread,
which drives it here, so that its time is in the ledger.

Who waits for what: the loop waits for requests or for programs to end when the engine has no work, a twentieth of a
second at a time.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from paceline.agents.counts import AgentCounts
from paceline.agents.tools import PROGRAM_JOBS
from paceline.rewards.pool import PendingScore, RewardPool
from paceline.rollout.protocol import OnSample, RolloutRequest, RolloutStats, SamplingParams, StreamingEngine
from paceline.serve.app import ServeApp, ServedModel
from paceline.serve.engine_loop import EngineLoop
from paceline.serve.guard import ServeLimits
from paceline.serve.server import http_thread
from paceline.serve.sessions import Session
from paceline.telemetry.ledger import Ledger
from paceline.types import RewardJob, RewardSpec, Sample, Verdict

_WAIT_S = 0.05


class CountingEngine(StreamingEngine, Protocol):
    """A streaming engine whose counts a `generate` begins anew."""

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """See `RolloutEngine`."""
        ...

    @property
    def stats(self) -> RolloutStats:
        """Counts since the last `generate` began."""
        ...


class ProgramLoop:
    """Plays whole batches of episodes; see the module's docstring. `counts` are those of the last `generate`."""

    def __init__(
        self,
        engine: CountingEngine,
        model: ServedModel,
        program: str,
        num_workers: int,
        timeout_s: float,
        ledger: Ledger,
        log_path: Path | None = None,
    ) -> None:
        self.counts = AgentCounts()
        self._engine, self._model, self._ledger = engine, model, ledger
        self._loop = EngineLoop(engine)
        self._app = ServeApp(self._loop, model, ServeLimits(max_new_tokens=model.max_context))
        self._num_batches = 0
        self._stack = ExitStack()
        self._url = self._stack.enter_context(http_thread(self._app))
        spec = RewardSpec(PROGRAM_JOBS, {"program": program})
        self._pool = RewardPool(spec, num_workers, timeout_s, log_path, gives_text=True)
        self._stack.callback(self._pool.close)

    def close(self) -> None:
        """Ends programs and server."""
        self._stack.close()

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """One episode per seed, by request and in order of the seeds. The longest branch of an episode is its sample;
        prompt and `max_new_tokens` together bound all its tokens."""
        self.counts = AgentCounts()
        self._engine.generate((), params)
        self._num_batches += 1
        playing = {
            self._start(index, sample_index, request, params): (index, sample_index)
            for index, request in enumerate(requests)
            for sample_index in range(len(request.seeds))
        }
        finished: dict[tuple[int, int], Sample] = {}
        while playing:
            self._round()
            for ended in [pending for pending in playing if pending.done()]:
                index, sample_index = playing.pop(ended)
                sample = self._sample(index, sample_index, requests[index], ended.result())
                finished[index, sample_index] = sample
                if on_sample is not None:
                    on_sample(index, sample)
        while self._loop.num_active:  # of programs that were killed: their clients have left
            self._round()
        return [
            tuple(finished[index, sample] for sample in range(len(request.seeds)))
            for index, request in enumerate(requests)
        ]

    def _round(self) -> None:
        if self._engine.has_work:
            self._loop.round()
        else:
            with self._ledger.span("tools", "waiting for programs", cause="queue"):
                self._loop.round(wait_s=_WAIT_S)

    def _session_id(self, index: int, sample_index: int) -> str:
        return f"{self._num_batches}-{index}-{sample_index}"

    def _start(
        self, index: int, sample_index: int, request: RolloutRequest, params: SamplingParams
    ) -> PendingScore:
        name, prompt = self._session_id(index, sample_index), request.prompt
        session = self._app.sessions.open(name, request.seeds[sample_index])
        session.temperature = params.temperature
        session.max_total_tokens = len(prompt.token_ids) + request.max_new_tokens
        arguments = {
            "base_url": f"{self._url}/sessions/{name}/v1",
            "model": self._model.name,
            "messages": [dict(message) for message in prompt.messages],
            "answer": prompt.answer,
            "metadata": dict(prompt.metadata),
        }
        return self._pool.submit(RewardJob("", "", None, arguments))

    def _sample(self, index: int, sample_index: int, request: RolloutRequest, verdict: Verdict) -> Sample:
        session = self._app.sessions.close(self._session_id(index, sample_index))
        assert session is not None
        failed = verdict.outcome != "score"
        self.counts.num_episodes += 1
        self.counts.num_turns += session.num_turns
        self.counts.num_errors += verdict.outcome == "error"
        self.counts.num_timeouts += verdict.outcome == "timeout"
        self.counts.tool_s += verdict.seconds
        sample = self._longest(session, request, sample_index)
        if verdict.message and not failed:
            sample = replace(sample, text=verdict.message)
        if failed:  # half an episode says nothing about its reward
            sample = replace(sample, loss_mask=(0,) * len(sample.token_ids), finish_reason="abort")
        return sample

    def _longest(self, session: Session, request: RolloutRequest, sample_index: int) -> Sample:
        prompt_id, seed = request.prompt.prompt_id, request.seeds[sample_index]
        branches = session.samples(prompt_id)
        if not branches:
            self.counts.num_without_turn += 1
            end = (min(self._model.stop_token_ids, default=0),)
            version = self._engine.weight_version
            return Sample(prompt_id, sample_index, end, (0.0,), (0,), "abort", version, seed, "")
        self.counts.num_branches_dropped += len(branches) - 1
        prompt_ids, sample = max(branches, key=lambda branch: sum(branch[1].loss_mask))
        self.counts.num_inserted_tokens += sample.loss_mask.count(0)
        same = prompt_ids == request.prompt.token_ids
        return replace(sample, sample_index=sample_index, prompt_token_ids=() if same else prompt_ids)
