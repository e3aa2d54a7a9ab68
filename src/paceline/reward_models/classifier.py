"""A reward model: a sequence classifier with one label, on the same plans and engine as every other model.

The engine reads a value *before* every response token, at the position that predicts it. A conversation is therefore
handed over with one token appended: the value before that token is read at the conversation's last real token, by
length and not by looking for a padding token. The appended token is seen by nobody.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.engine.meeting import meet
from paceline.engine.model_engine import ModelEngine
from paceline.model.host_weights import move_to_host, on_device
from paceline.model.inputs import ModelInputs
from paceline.model.loading import CausalModel
from paceline.model.value_head import ValueModel, response_values
from paceline.reward_models.conversation import render_conversation, shared_length
from paceline.rewards.pool import PendingScore
from paceline.telemetry.ledger import Ledger
from paceline.types import RewardJob, Verdict

_APPENDED = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A `TokenPair` of the engine: `prompt_ids` is what conversations of one prompt share, `response_ids` the rest and
    the appended token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    @classmethod
    def split(cls, token_ids: tuple[int, ...], num_shared: int) -> "Conversation":
        """Cuts after the shared tokens."""
        return cls(token_ids[:num_shared], (*token_ids[num_shared:], _APPENDED))


class ClassifierScorer:
    """A `RewardSource` that scores everything it was given in one forward-only pass, on `flush`.

    With several ranks the model may be divided over them: every rank then calls `flush` when the others do, and each
    scores a share of all conversations.
    """

    def __init__(
        self,
        model: ValueModel,
        tokenizer: PreTrainedTokenizerBase,
        engine: ModelEngine,
        ledger: Ledger,
        *,
        max_tokens: int,
        host_between_uses: bool = False,
    ) -> None:
        """`max_tokens` is the longest conversation that is scored, in tokens."""
        self._model, self._tokenizer, self._engine, self._ledger = model, tokenizer, engine, ledger
        self._max_tokens = max_tokens
        self._host_between_uses = host_between_uses
        self._waiting: list[tuple[RewardJob, PendingScore]] = []
        self._counts: Counter[str] = Counter()
        if host_between_uses:
            move_to_host(model)

    def submit(self, job: RewardJob) -> PendingScore:
        """Keeps one job for the next `flush`."""
        future: PendingScore = Future()
        self._waiting.append((job, future))
        return future

    def flush(self) -> None:
        """Scores all that wait, of all ranks."""
        waiting, self._waiting = self._waiting, []
        started = time.perf_counter()
        refusals, rendered = self._rendered([job for job, _ in waiting])
        scores = self._scores(_conversations([job for job, _ in waiting], rendered))
        seconds = (time.perf_counter() - started) / max(1, len(waiting))
        for index, (_, future) in enumerate(waiting):
            if index in refusals:
                future.set_result(Verdict("error", None, seconds, refusals[index]))
            elif not math.isfinite(scores[index]):
                future.set_result(Verdict("error", None, seconds, f"the model's score is {scores[index]}"))
            else:
                future.set_result(Verdict("score", scores[index], seconds))

    def take_counts(self) -> Mapping[str, int]:
        """Conversations too long since the last call."""
        counts = {"overlong": self._counts["overlong"]}
        self._counts.clear()
        return counts

    def close(self) -> None:
        """Forgets what waits; the model goes with its last user."""
        self._waiting = []

    def _rendered(self, jobs: Sequence[RewardJob]) -> tuple[dict[int, str], dict[int, tuple[int, ...]]]:
        """Why a job cannot be scored, and the tokens of those that can, by index."""
        refusals: dict[int, str] = {}
        rendered: dict[int, tuple[int, ...]] = {}
        for index, job in enumerate(jobs):
            try:
                token_ids = render_conversation(self._tokenizer, job)
            except TemplateError as error:
                refusals[index] = f"the chat template refuses the conversation: {error}"
                continue
            if 0 < len(token_ids) <= self._max_tokens:
                rendered[index] = token_ids
                continue
            refusals[index] = (
                f"a conversation of {len(token_ids)} tokens, and at most {self._max_tokens} are read"
            )
            self._counts["overlong"] += 1
        return refusals, rendered

    def _scores(self, own: Mapping[int, Conversation]) -> dict[int, float]:
        mesh = self._engine.mesh
        meet(mesh, self._ledger, "the others' conversations")
        shares: list[list[Conversation]] = mesh.gather_objects(list(own.values()))
        everyones = [conversation for share in shares for conversation in share]
        if not everyones:
            return {}
        with on_device(self._model) if self._host_between_uses else nullcontext():
            values = self._engine.forward_only(everyones, "reward", _read)
        first = sum(map(len, shares[: mesh.rank]))
        mine = values[first : first + len(own)]
        return {index: float(value_L[-1]) for index, value_L in zip(own, mine, strict=True)}


def _conversations(
    jobs: Sequence[RewardJob], rendered: Mapping[int, tuple[int, ...]]
) -> dict[int, Conversation]:
    """Conversations of one prompt are cut at the same place, so that what they share is computed once."""
    by_prompt: dict[str, list[int]] = {}
    for index in rendered:
        by_prompt.setdefault(jobs[index].prompt, []).append(index)
    found: dict[int, Conversation] = {}
    for members in by_prompt.values():
        num_shared = shared_length([rendered[index] for index in members])
        found.update({index: Conversation.split(rendered[index], num_shared) for index in members})
    return {index: found[index] for index in rendered}


def _read(model: CausalModel, inputs: ModelInputs) -> tuple[Tensor, ...]:
    assert isinstance(model, ValueModel)
    return (response_values(model, inputs),)
