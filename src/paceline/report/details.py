"""Configuration and environment as folded lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report import wording


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


def configuration(config: Mapping[str, Any]) -> list[DetailGroup]:
    """Every setting, by section; nothing when there is no config."""
    sections = [
        DetailSection(str(name), _flat(content))
        for name, content in config.items()
        if isinstance(content, Mapping) and content
    ]
    num_settings = sum(len(section.entries) for section in sections)
    return [DetailGroup("Configuration", f"{num_settings} settings", sections)] if sections else []


def environment(found: Mapping[str, Any]) -> list[DetailGroup]:
    """What the run ran on: single values first, then every nested block."""
    single = {key: value for key, value in found.items() if not isinstance(value, Mapping) and key != "v"}
    sections = [DetailSection("machine", _flat(single))] if single else []
    sections += [
        DetailSection(str(name), _flat(content))
        for name, content in found.items()
        if isinstance(content, Mapping) and content
    ]
    return [DetailGroup("Environment", "versions and hardware", sections)] if sections else []


def _flat(content: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, str]]:
    entries: list[tuple[str, str]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            entries += _flat(value, f"{name}.")
        else:
            entries.append((name, _text(name, value)))
    return entries


def _text(name: str, value: Any) -> str:
    if value is None or value in ("", {}, []):
        return wording.UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return wording.memory(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(item) for item in value)
    return str(value)
