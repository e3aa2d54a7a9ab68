"""A few samples as the page shows them: not hand-picked, prompts without their shared beginning."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report import formats
from paceline.report.run_data import SampleFile
from paceline.report.words import Words

_NUM_PROMPTS = 4
_NUM_WITHOUT_SCORE = 2
_MIN_SHARED = 120
_MAX_TEXT = 4000

_OUTCOMES = {"timeout": "samples.timeout", "error": "samples.error"}
_ENDINGS = {"length": "samples.cut", "abort": "samples.aborted"}


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample: texts as they are (the template escapes them)."""

    prompt: str
    completion: str
    answer: str | None
    reward: str
    quality: str
    note: str


@dataclass(frozen=True, slots=True)
class SampleStep:
    """The shown samples of one step, of how many, and the step's mean reward."""

    step: int
    num_samples: int
    mean_reward: str
    samples: tuple[SampleView, ...]


def shared_beginning(files: Sequence[SampleFile]) -> str:
    """What all prompts begin with (instructions, worked examples), up to a line's end; "" when short or one prompt."""
    prompts = {str(row.get("prompt", "")) for file in files for row in file.rows}
    if len(prompts) < 2:
        return ""
    first, last = min(prompts), max(prompts)  # the two that differ earliest
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    prefix = first[: first.rfind("\n", 0, same) + 1]
    return prefix if len(prefix) >= _MIN_SHARED else ""


def sample_steps(files: Sequence[SampleFile], shared: str, words: Words) -> list[SampleStep]:
    """The first sample of the first few prompts of each file, and a few that got no score, if any did."""
    return [_sample_step(file, shared, words) for file in files]


def _sample_step(file: SampleFile, shared: str, words: Words) -> SampleStep:
    first_of_prompt: dict[Any, Mapping[str, Any]] = {}
    for row in file.rows:
        first_of_prompt.setdefault(row.get("prompt_id"), row)
    shown = list(first_of_prompt.values())[:_NUM_PROMPTS]
    unscored = [row for row in file.rows if row.get("outcome", "score") != "score" and row not in shown]
    rewards = [value for row in file.rows if (value := _reward(row)) is not None]
    return SampleStep(
        step=file.step,
        num_samples=len(file.rows),
        mean_reward=formats.number(math.fsum(rewards) / len(rewards)) if rewards else formats.UNKNOWN,
        samples=tuple(_view(row, shared, words) for row in [*shown, *unscored[:_NUM_WITHOUT_SCORE]]),
    )


def _reward(row: Mapping[str, Any]) -> float | None:
    value = row.get("reward", row.get("score"))
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number and value is not None else None


def _view(row: Mapping[str, Any], shared: str, words: Words) -> SampleView:
    reward, outcome = _reward(row), row.get("outcome", "score")
    notes = []
    if outcome not in ("score", "aborted"):  # how it ended says it already
        name = words(_OUTCOMES[outcome]) if outcome in _OUTCOMES else str(outcome)
        notes.append(f"{name}: {row['message']}" if row.get("message") else name)
    if (reason := row.get("finish_reason")) not in (None, "stop"):
        notes.append(words(_ENDINGS[reason]) if reason in _ENDINGS else str(reason))
    answer = row.get("answer")
    return SampleView(
        prompt=_shortened(str(row.get("prompt", "")).removeprefix(shared), words),
        completion=_shortened(str(row.get("completion", "")), words),
        answer=None if answer is None else str(answer),
        reward=words("samples.no-score") if reward is None else formats.number(reward),
        quality="none"
        if reward is None
        else "full"
        if reward >= 1.0
        else "zero"
        if reward <= 0.0
        else "part",
        note=" · ".join(notes),
    )


def _shortened(text: str, words: Words) -> str:
    """Long texts lose their middle, and say how much of it."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    left_out = words("samples.left-out", count=f"{len(text) - _MAX_TEXT:,}")
    return f"{text[:half]}\n{left_out}\n{text[-half:]}"
