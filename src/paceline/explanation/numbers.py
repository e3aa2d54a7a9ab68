"""Numbers on their way into a text: each knows which figure of the records it is, and is written down when used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.diagnosis.wording import number, percent, seconds, singular

Unit = Literal["s", "share", "count", "ratio", "id"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the records. `key` says which (docs/performance-lab.md lists them), `value` is not rounded."""

    key: str
    value: float
    unit: Unit

    @property
    def text(self) -> str:
        """The number as it is read: rounded to three digits, with its unit."""
        match self.unit:
            case "s":
                return seconds(self.value)
            case "share":
                return percent(self.value)
            case "count":
                return number(self.value)
            case "ratio":
                return f"{self.value:.2f}"
            case "id":
                return f"{self.value:.0f}"

    def as_dict(self) -> dict[str, str | float]:
        """For JSON."""
        return {"text": self.text, "key": self.key, "value": self.value, "unit": self.unit}


@dataclass(slots=True)
class Phrases:
    """The templates of a language, filled in; `used` holds every figure that went into a text, in order."""

    templates: Mapping[str, str]
    separator: str
    used: list[Figure] = field(default_factory=list)

    def say(self, template: str, **values: Figure | str) -> str:
        """A template with its values.

        Raises:
            KeyError: there is no such template, or a value it needs is missing.
        """
        content = self.templates[template]
        order = sorted(values, key=lambda name: content.find(f"{{{name}}}"))
        shown: dict[str, str] = {}
        for name in order:
            value = values[name]
            if isinstance(value, Figure):
                self.used.append(value)
                shown[name] = value.text
            else:
                shown[name] = value
        return singular(content.format(**shown))

    def listed(self, items: list[str]) -> str:
        """Several things in a row."""
        return self.separator.join(items)
