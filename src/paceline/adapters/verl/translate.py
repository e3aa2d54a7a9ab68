"""A verl launch as a paceline recipe, with everything that has no counterpart said."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.adapters.verl.launch import VerlLaunch
from paceline.adapters.verl.translation_algorithm import translate_algorithm
from paceline.adapters.verl.translation_notes import reason_for
from paceline.adapters.verl.translation_rest import translate_batch, translate_placement, translate_rest
from paceline.adapters.verl.translation_state import Translator
from paceline.config import ConfigError, load_config
from paceline.config.loading import parse_number
from paceline.config.names import FIELDS
from paceline.config.yaml_scalars import write_yaml


@dataclass(frozen=True, slots=True)
class Translation:
    """The recipe's sections, and what a person must know: `differs` is said differently here, `missing` has no
    counterpart (verl's setting to the reason), `refused` broke a rule here and was changed or left out,
    `problems` remain."""

    sections: Mapping[str, Mapping[str, Any]]
    differs: tuple[str, ...]
    missing: Mapping[str, str]
    refused: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())

    @property
    def recipe(self) -> str:
        """The recipe with the remarks above it as comments."""
        remarks = [*(f"differs: {text}" for text in self.differs)]
        remarks += [f"refused here: {text}" for text in self.refused]
        remarks += [
            f"no counterpart: {', '.join(keys)}: {reason}" for reason, keys in self._by_reason().items()
        ]
        remarks += [f"to do: {text}" for text in self.problems]
        header = "".join(f"# {text}\n" for text in remarks)
        return f"# Translated from a verl launch.\n{header}{write_yaml(dict(self.sections))}"

    def _by_reason(self) -> dict[str, list[str]]:
        grouped: dict[str, list[str]] = {}
        for key, reason in self.missing.items():
            grouped.setdefault(reason, []).append(key)
        return grouped


def translate_launch(launch: VerlLaunch) -> Translation:
    """The recipe that says the same, as far as this version has settings for it. Every key in it exists and the whole
    has passed `load_config`, unless `problems` says otherwise."""
    state = Translator(launch)
    for part in (translate_algorithm, translate_batch, translate_rest, translate_placement):
        part(state)
    missing = dict(state.missing)
    for key in launch.settings:
        if key not in state.read and key not in missing:
            missing[key] = reason_for(key)
    missing = {key: reason for key, reason in missing.items() if reason}
    differs = [*state.differs, *_unknown(launch, state)]
    sections, refused, problems = _accepted(state.sections)
    return Translation(_ordered(sections), tuple(differs), missing, refused, problems)


def _unknown(launch: VerlLaunch, state: Translator) -> Iterator[str]:
    for section, content in state.sections.items():
        for key, value in content.items():
            if isinstance(value, str) and ("${" in value or "$(" in value):
                yield f"{section}.{key} = {value}: the script takes it from outside; set it"


def _accepted(
    sections: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...], tuple[str, ...]]:
    """The sections without what a rule refuses; what was left out; what leaving out does not cure."""
    kept = {section: dict(content) for section, content in sections.items()}
    refused: list[str] = []
    replaced: set[str] = set()
    while True:
        try:
            load_config(sections=kept)
        except ConfigError as error:
            removable = [p for p in error.problems if _holds(kept, p.key)]
            if not removable:
                return kept, tuple(refused), tuple(p.line for p in error.problems)
            refused += [f"{problem.line}; {_cure(kept, problem, replaced)}" for problem in removable]
        else:
            return kept, tuple(refused), ()


def _cure(sections: dict[str, dict[str, Any]], problem: ConfigError, replaced: set[str]) -> str:
    """Puts the nearest valid number in place, or takes the setting out where there is none; says which."""
    section, _, key = problem.key.partition(".")
    number = parse_number((problem.nearest or "").partition(",")[0])
    if number is None or problem.key in replaced:
        sections[section].pop(key, None)
        return "left out"
    replaced.add(problem.key)
    sections[section][key] = number
    return f"the recipe has {number}"


def _holds(sections: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    section, _, key = name.partition(".")
    return sections.get(section, {}).get(key) is not None


def _ordered(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections and keys in the schema's order, empty sections left out."""
    return {
        section: {key: sections[section][key] for key in fields if key in sections[section]}
        for section, fields in FIELDS.items()
        if sections.get(section)
    }
