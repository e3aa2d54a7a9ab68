"""The one refusal: which setting, which value, which rule it breaks, and what would be valid."""

from collections.abc import Sequence
from functools import partial
from typing import Any

_LONGEST_VALUE = 120


class ConfigError(ValueError):
    """A setting is refused. `str()` is one line per problem; `problems` holds them one by one.

    `key` is the dotted name of the setting, `value` what it was, `rule` what must hold and `nearest` the nearest
    valid value (or setting), where there is one. `zh` is the rule in Chinese, which refusals of commands with `--lang`
    have.
    """

    def __init__(
        self,
        key: str,
        value: Any,
        rule: str,
        nearest: str | None = None,
        others: Sequence["ConfigError"] = (),
        *,
        zh: str | None = None,
    ) -> None:
        self.key = key
        self.value = value
        self.rule = rule
        self.nearest = nearest
        self.zh = zh
        self.problems: tuple[ConfigError, ...] = (self, *(one for other in others for one in other.problems))
        super().__init__("\n".join(problem.line for problem in self.problems))

    @classmethod
    def join(cls, problems: Sequence["ConfigError"]) -> "ConfigError":
        """One error that shows every problem, in order. `problems` holds at least one."""
        first, *others = problems
        return cls(
            first.key, first.value, first.rule, first.nearest, (*first.problems[1:], *others), zh=first.zh
        )

    @property
    def line(self) -> str:
        """This problem alone, on one line."""
        return self.line_in("en")

    def line_in(self, lang: str) -> str:
        """`line` in "en" or "zh"; a rule that nobody has put into Chinese stays English."""
        if lang == "zh":
            advice = f"（最接近的有效值：{self.nearest}）" if self.nearest else ""
            text = f"{self.key} = {_shown(self.value)}：{self.zh or self.rule}{advice}"
        else:
            advice = f" (nearest: {self.nearest})" if self.nearest else ""
            text = f"{self.key} = {_shown(self.value)}: {self.rule}{advice}"
        return text.replace("\n", " ")

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.key, self.value, self.rule, self.nearest, self.problems[1:])
        return partial(type(self), zh=self.zh), parts


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
