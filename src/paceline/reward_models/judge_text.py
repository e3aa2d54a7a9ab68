"""What a judge is asked, and how its answer becomes a score. Torch-free."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment

from paceline.config.errors import ConfigError
from paceline.config.reward_schema import JudgeSource
from paceline.reward_models.conversation import messages_of
from paceline.types import RewardJob

VARIABLES = ("question", "completion", "answer", "prompt", "messages", "metadata")

DEFAULT_TEMPLATE = """\
Judge an answer to a question.

Question:
{{ question }}
{% if answer is not none %}
Reference answer:
{{ answer }}
{% endif %}
Answer to judge:
{{ completion }}

Say briefly what is right and what is wrong in it. Then end with one line `Score: N`, N a number from 0 (wrong or \
useless) to 10 (right and complete)."""

DEFAULT_PATTERN = r"Score:\s*\**\s*(-?\d+(?:\.\d+)?)"
DEFAULT_BOUNDS = (0.0, 10.0)
_SHOWN_END = 120


class JudgeTemplate:
    """The request's Jinja template.

    Raises:
        ConfigError: it cannot be read, is no template, or uses a name that it is not given. `key` is its setting.
    """

    def __init__(self, path: str | None, key: str) -> None:
        text = DEFAULT_TEMPLATE
        if path is not None:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(key, path, f"must be a readable file: {error}", "null") from error
        environment = SandboxedEnvironment(undefined=StrictUndefined)
        try:
            unknown = meta.find_undeclared_variables(environment.parse(text)) - set(VARIABLES)
        except TemplateError as error:
            raise ConfigError(key, path, f"is not a Jinja template: {error}") from error
        if unknown:
            rule = f"uses {', '.join(sorted(unknown))}; a template is given {', '.join(VARIABLES)}"
            raise ConfigError(key, path, rule)
        self._template = environment.from_string(text)

    def render(self, job: RewardJob) -> str:
        """The request about one completion. `question` is the conversation's last message.

        Raises:
            TemplateError: the template uses a field this sample does not have.
        """
        messages = messages_of(job)
        return self._template.render(
            question=messages[-1]["content"],
            completion=job.completion,
            answer=job.answer,
            prompt=job.prompt,
            messages=messages,
            metadata=job.metadata,
        )


@dataclass(frozen=True, slots=True)
class ScoreReader:
    """Finds the score in a judge's text: the last match of `pattern`, or the number under `json_key` in the last JSON
    object that has it."""

    pattern: re.Pattern[str] | None
    json_key: str | None
    lowest: float
    highest: float

    @classmethod
    def of(cls, source: JudgeSource) -> "ScoreReader":
        """As the source says; with the default template and pattern, a score lies between 0 and 10."""
        asks_as_usual = source.template is None
        lowest, highest = DEFAULT_BOUNDS if asks_as_usual else (-math.inf, math.inf)
        pattern = None
        if source.score_key is None:
            pattern = re.compile(source.score_pattern or DEFAULT_PATTERN)
        return cls(
            pattern,
            source.score_key,
            lowest if source.lowest is None else source.lowest,
            highest if source.highest is None else source.highest,
        )

    def read(self, text: str) -> tuple[float | None, str]:
        """The score, or None and why there is none."""
        if self.json_key is not None:
            found = _last_value(text, self.json_key)
            wanted = f"no JSON object with a number under {self.json_key!r}"
        else:
            assert self.pattern is not None
            matches = self.pattern.findall(text)
            found = matches[-1] if matches else None
            wanted = f"nothing that {self.pattern.pattern!r} matches"
        score = _number(found)
        end = text.strip()[-_SHOWN_END:]
        if score is None:
            return None, f"the judge's text has {wanted}; it ends {end!r}"
        if not self.lowest <= score <= self.highest:
            return (
                None,
                f"the judge's score {score:g} is not within {self.lowest:g} and {self.highest:g}; {end!r}",
            )
        return score, ""


def _last_value(text: str, key: str) -> Any:
    """What the last JSON object in `text` that has `key` holds under it; objects within a found one do not count."""
    decoder = json.JSONDecoder()
    found, start = None, text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        else:
            if isinstance(value, Mapping) and key in value:
                found = value[key]
        start = text.find("{", end)
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
