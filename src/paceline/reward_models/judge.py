"""A judge: a language model that writes a verdict on the native engine, from which a score is read."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paceline.data.seeds import child_seed
from paceline.model.host_weights import move_to_host, on_device
from paceline.model.loading import CausalModel
from paceline.reward_models.judge_text import JudgeTemplate, ScoreReader
from paceline.rewards.pool import PendingScore
from paceline.rollout import NativeEngine, RolloutRequest, SamplingParams
from paceline.telemetry.ledger import Ledger
from paceline.types import Prompt, RewardJob, Sample, Verdict


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """`temperature` 0 is greedy; `seed` decides what is drawn otherwise, for one request always the same."""

    temperature: float
    max_new_tokens: int
    seed: int
    host_between_uses: bool = False


class JudgeScorer:
    """A `RewardSource` that judges everything it was given in one batch, on `flush`. Every rank has a whole judge and
    asks it about its own samples."""

    def __init__(
        self,
        model: CausalModel,
        tokenizer: PreTrainedTokenizerBase,
        engine: NativeEngine,
        ledger: Ledger,
        template: JudgeTemplate,
        reader: ScoreReader,
        settings: JudgeSettings,
    ) -> None:
        self._model, self._tokenizer, self._engine, self._ledger = model, tokenizer, engine, ledger
        self._template, self._reader, self._settings = template, reader, settings
        self._params = SamplingParams(settings.temperature, _stop_tokens(model, tokenizer))
        self._waiting: list[tuple[RewardJob, PendingScore]] = []
        self._counts: Counter[str] = Counter()
        if settings.host_between_uses:
            move_to_host(model)

    def submit(self, job: RewardJob) -> PendingScore:
        """Keeps one job for the next `flush`."""
        future: PendingScore = Future()
        self._waiting.append((job, future))
        return future

    def flush(self) -> None:
        """Judges all that wait."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        started = time.perf_counter()
        outcomes: dict[int, tuple[float | None, str]] = {}
        requests: dict[int, RolloutRequest] = {}
        for index, (job, _) in enumerate(waiting):
            request = self._request(index, job)
            if isinstance(request, str):
                outcomes[index] = None, request
            else:
                requests[index] = request
        for index, sample in zip(requests, self._generate(list(requests.values())), strict=True):
            outcomes[index] = self._reader.read(sample.text)
            self._counts["unparseable"] += outcomes[index][0] is None
        seconds = (time.perf_counter() - started) / len(waiting)
        for index, (_, future) in enumerate(waiting):
            score, message = outcomes[index]
            future.set_result(Verdict("error" if score is None else "score", score, seconds, message))

    def take_counts(self) -> Mapping[str, int]:
        """Verdicts without a score, requests too long and tokens written since the last call."""
        counts = {name: self._counts[name] for name in ("unparseable", "overlong", "verdict_tokens")}
        self._counts.clear()
        return counts

    def close(self) -> None:
        """Gives the cache back."""
        self._waiting = []
        self._engine.sleep()

    def _request(self, index: int, job: RewardJob) -> RolloutRequest | str:
        """What to ask about one completion, or why it cannot be asked."""
        try:
            text = self._template.render(job)
            token_ids = self._tokens(text)
        except TemplateError as error:
            return f"the judge cannot be asked: {type(error).__name__}: {error}"
        room = self._model.max_context - self._settings.max_new_tokens
        if not 0 < len(token_ids) <= room:
            self._counts["overlong"] += 1
            return f"a request of {len(token_ids)} tokens, and the judge's context leaves {room}"
        seed = child_seed(self._settings.seed, text)
        return RolloutRequest(
            Prompt(f"judge:{index}", token_ids, text), (seed,), self._settings.max_new_tokens
        )

    def _tokens(self, text: str) -> tuple[int, ...]:
        """The request as a user's message where the judge has a chat template, else as it is."""
        if not self._tokenizer.chat_template:
            return tuple(self._tokenizer(text)["input_ids"])
        message = {"role": "user", "content": text}
        rendered = self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _weights(self) -> AbstractContextManager[None]:
        return on_device(self._model) if self._settings.host_between_uses else nullcontext()

    def _generate(self, requests: Sequence[RolloutRequest]) -> list[Sample]:
        if not requests:
            return []
        with self._ledger.span("reward", "judge", absorb=True) as span, self._weights():
            groups = self._engine.generate(requests, self._params)
            stats = self._engine.stats
            span.add(tokens=stats.num_generated_tokens, flops=stats.flops)
            self._counts["verdict_tokens"] += stats.num_generated_tokens
            self._engine.sleep()  # the cache must not take memory from rollout and training
        return [sample for (sample,) in groups]


def _stop_tokens(model: CausalModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End tokens of the tokenizer and of the model's own generation settings."""
    generation = model.module.generation_config
    stated = None if generation is None else generation.eos_token_id
    found = stated if isinstance(stated, list) else [stated]
    return frozenset(token for token in (*found, tokenizer.eos_token_id) if token is not None)
