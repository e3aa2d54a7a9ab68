"""What a translation collects while it goes through a launch."""

from dataclasses import dataclass, field
from typing import Any

from paceline.adapters.verl.launch import VerlLaunch
from paceline.config.names import FIELDS

_NOTHING = object()


@dataclass(slots=True)
class Translator:
    """`read` are verl's settings that were taken into account; `sections` the recipe so far."""

    launch: VerlLaunch
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def take(self, key: str) -> Any:
        """verl's value in force, marked as read under every name it may have."""
        self.read.add(key)
        override = self.launch.find(key)
        if override is not None:
            self.read.add(override.key)
        return self.launch.get(key)

    def put(self, name: str, value: Any, default: Any = _NOTHING) -> None:
        """Writes a setting unless the value is the one it has anyway (`default`: the preset's, where it has one)."""
        section, _, key = name.partition(".")
        present = FIELDS[section][key].get_default(call_default_factory=True)
        usual = present if default is _NOTHING else default
        if value is not None and value != (list(usual) if isinstance(usual, tuple) else usual):
            self.sections.setdefault(section, {})[key] = value

    def copy(self, key: str, name: str) -> None:
        """The same value under our name."""
        self.put(name, self.take(key))

    def lacks(self, key: str, reason: str) -> None:
        """Notes that a setting has no counterpart."""
        self.take(key)
        self.missing[key] = reason
