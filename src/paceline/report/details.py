"""Configuration and environment as folded lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report import formats
from paceline.report.words import Words


@dataclass(frozen=True, slots=True)
class DetailSection:
    """A titled list of names and values."""

    title: str
    entries: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class DetailGroup:
    """What one folded block holds."""

    title: str
    hint: str
    sections: list[DetailSection]


def configuration(config: Mapping[str, Any], words: Words) -> list[DetailGroup]:
    """Every setting, by section; nothing when there is no config."""
    sections = [
        DetailSection(str(name), _flat(content, words))
        for name, content in config.items()
        if isinstance(content, Mapping) and content
    ]
    num_settings = sum(len(section.entries) for section in sections)
    hint = words("details.settings", count=num_settings)
    return [DetailGroup(words("details.configuration"), hint, sections)] if sections else []


def environment(found: Mapping[str, Any], words: Words) -> list[DetailGroup]:
    """What the run ran on: single values first, then every nested block."""
    single = {key: value for key, value in found.items() if not isinstance(value, Mapping) and key != "v"}
    sections = [DetailSection(words("details.machine"), _flat(single, words))] if single else []
    sections += [
        DetailSection(str(name), _flat(content, words))
        for name, content in found.items()
        if isinstance(content, Mapping) and content
    ]
    hint = words("details.environment-hint")
    return [DetailGroup(words("details.environment"), hint, sections)] if sections else []


def _flat(content: Mapping[Any, Any], words: Words, prefix: str = "") -> list[tuple[str, str]]:
    entries: list[tuple[str, str]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            entries += _flat(value, words, f"{name}.")
        else:
            entries.append((name, _text(name, value, words)))
    return entries


def _text(name: str, value: Any, words: Words) -> str:
    if value is None or value in ("", {}, []):
        return formats.UNKNOWN
    if isinstance(value, bool):
        return words("details.yes" if value else "details.no")
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return formats.memory(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(item) for item in value)
    return str(value)
