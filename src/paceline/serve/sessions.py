"""Episodes that clients play over HTTP, kept as the tokens that were read and sampled.

A session's turns are merged by token prefix: a turn whose prompt begins with all tokens of an earlier one continues it,
and what stands between them (the end of the turn, a tool's output, the next question) was not sampled: its loss mask is
0. A conversation that a client sends as text continues on the sampled tokens where it repeats what the model said;
nothing that was sampled is tokenised again.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.data.turns import TurnRenderer
from paceline.types import FinishReason, Sample

Messages = Sequence[Mapping[str, str]]


@dataclass(slots=True)
class Branch:
    """One line of an episode: `prompt_ids`, then sampled and inserted tokens. `messages` are the conversation that led
    here, the last answer included; empty where prompts came as tokens."""

    prompt_ids: tuple[int, ...]
    messages: list[Mapping[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_turns: int = 0
    finish_reason: FinishReason = "stop"
    last_text: str = ""

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Everything the model has before it."""
        return (*self.prompt_ids, *self.token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one answer consisted of."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str


class Session:
    """One episode. May be used from several threads."""

    def __init__(self, session_id: str, renderer: TurnRenderer, seed: int = 0) -> None:
        self.session_id, self.seed = session_id, seed
        self.temperature: float | None = None
        """The one temperature of its turns; None: each request names its own."""
        self.max_total_tokens: int | None = None
        """Bound on prompt, answers and what stands between them; None: the model's context."""
        self._renderer = renderer
        self._branches: list[Branch] = []
        self._lock = threading.Lock()

    @property
    def num_turns(self) -> int:
        """Answers so far."""
        return sum(branch.num_turns for branch in self._branches)

    def prompt_ids(self, messages: Messages) -> tuple[int, ...]:
        """Tokens to answer a conversation from: those of an earlier turn and what follows it, or a new rendering."""
        with self._lock:
            for branch in reversed(self._branches):
                known = len(branch.messages)
                if known and len(messages) > known and list(messages[:known]) == branch.messages:
                    rest = self._renderer.continuation(branch.token_ids, messages[known:])
                    return (*branch.all_ids, *rest)
        return self._renderer.opening(messages)

    def record(self, prompt_ids: Sequence[int], turn: Turn, messages: Messages = ()) -> None:
        """Adds an answer to the branch it continues, or begins a new one."""
        prompt = tuple(prompt_ids)
        with self._lock:
            branch = self._continued(prompt)
            if branch is None:
                branch = Branch(prompt)
                self._branches.append(branch)
            inserted = prompt[len(branch.all_ids) :]
            version = turn.versions[0] if turn.versions else 0
            branch.token_ids += [*inserted, *turn.token_ids]
            branch.logprobs += [*[0.0] * len(inserted), *turn.logprobs]
            branch.loss_mask += [*[0] * len(inserted), *[1] * len(turn.token_ids)]
            branch.versions += [*[version] * len(inserted), *turn.versions]
            branch.messages = [*messages, {"role": "assistant", "content": turn.text}] if messages else []
            branch.num_turns += 1
            branch.finish_reason, branch.last_text = turn.finish_reason, turn.text

    def samples(self, prompt_id: str | None = None) -> list[tuple[tuple[int, ...], Sample]]:
        """Prompt tokens and sample of every branch, in the order in which they began."""
        with self._lock:
            return [
                (branch.prompt_ids, self._sample(prompt_id or self.session_id, index, branch))
                for index, branch in enumerate(self._branches)
            ]

    def _continued(self, prompt: tuple[int, ...]) -> Branch | None:
        """The longest branch whose tokens `prompt` begins with."""
        found = [b for b in self._branches if prompt[: len(b.all_ids)] == b.all_ids]
        return max(found, key=lambda branch: len(branch.all_ids), default=None)

    def _sample(self, prompt_id: str, index: int, branch: Branch) -> Sample:
        versions = set(branch.versions) or {0}
        return Sample(
            prompt_id=prompt_id,
            sample_index=index,
            token_ids=tuple(branch.token_ids),
            logprobs=tuple(branch.logprobs),
            loss_mask=tuple(branch.loss_mask),
            finish_reason=branch.finish_reason,
            weight_version=min(versions),
            seed=self.seed,
            text=branch.last_text,
            token_versions=tuple(branch.versions) if len(versions) > 1 else (),
        )


class SessionStore:
    """Sessions by id, at most `capacity`: the oldest is forgotten, and counted, when another one comes."""

    def __init__(self, renderer: TurnRenderer, capacity: int) -> None:
        self.num_forgotten = 0
        self._renderer, self._capacity = renderer, capacity
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def open(self, session_id: str, seed: int = 0) -> Session:
        """The session of that id, new where there is none."""
        with self._lock:
            found = self._sessions.get(session_id)
            if found is None:
                if len(self._sessions) >= self._capacity:
                    del self._sessions[next(iter(self._sessions))]
                    self.num_forgotten += 1
                found = self._sessions[session_id] = Session(session_id, self._renderer, seed)
            return found

    def find(self, session_id: str) -> Session | None:
        """The session of that id."""
        return self._sessions.get(session_id)

    def close(self, session_id: str) -> Session | None:
        """Takes a session out."""
        with self._lock:
            return self._sessions.pop(session_id, None)

    def __len__(self) -> int:
        return len(self._sessions)
