"""From a recipe, overrides and presets to one checked `Config`; and back to YAML.

Order, the later one winning: `base`, the recipe, `sections`, `overrides`, and the algorithm's preset for algorithm
fields that nobody set. Relative paths in a recipe stay as they are: relative to the working directory.
"""

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from paceline.config.arithmetic import check_context
from paceline.config.errors import ConfigError
from paceline.config.names import FIELDS, SECTIONS, nearest_setting
from paceline.config.parallelism import check_model_heads
from paceline.config.presets import PRESETS
from paceline.config.reward_problems import source_problem
from paceline.config.rules import check_rules
from paceline.config.schema import Config
from paceline.config.section import Section
from paceline.config.sft import require_command
from paceline.config.yaml_scalars import parse_yaml, write_yaml


def load_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
) -> Config:
    """Reads, merges, applies the preset and checks every rule.

    `recipe` is a YAML file or None; `base` (below the recipe) and `sections` (above it) are nested mappings such
    as `{"train": {"lr": 1e-5}}`; `overrides` are `section.key=value` texts, the last one of a key winning, with
    values read as in the recipe. In the result no field that a preset sets is None unless the preset says so.

    Raises:
        ConfigError: anything is refused; all problems found are in it.
    """
    merged: dict[str, Any] = {}
    layers = [base, read_recipe(Path(recipe)) if recipe is not None else None, sections]
    for layer in layers:
        if layer is not None:
            _merge(merged, _checked_sections(layer))
    for override in overrides:
        _merge(merged, parse_override(override))
    _apply_preset(merged)
    config = _validate(merged)
    check_rules(config)
    check_context(config)
    check_model_heads(config)
    return config


def load_sft_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    sections: Mapping[str, Any] | None = None,
) -> Config:
    """`load_config` for supervised fine-tuning, which a recipe need not say of itself. Raises `ConfigError`."""
    config = load_config(recipe, overrides, {"schedule": {"name": "sft"}}, sections)
    require_command(config, "sft")
    return config


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe's mapping. Raises `ConfigError` when the file is missing, unreadable or not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "recipe", str(path), f"must be a readable YAML file ({error})", _near(path)
        ) from error
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            "recipe", str(path), f"is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("recipe", str(path), "must hold sections such as `train:`", ", ".join(SECTIONS))
    return value


def parse_override(override: str) -> dict[str, Any]:
    """`section.key=value` as a nested mapping; `task.params.NAME=value` reaches into the task's parameters.

    A setting that holds text takes the value as it is written; any other is read as YAML. Raises `ConfigError`.
    """
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals:
        raise ConfigError(override, None, "an override is written section.key=value", f"{override}=VALUE")
    if len(path) < 2 or not all(path):
        raise ConfigError(name, text, "an override names a section and a key", nearest_setting(name))
    value: Any
    if _holds_text(path):
        value = None if text in ("null", "~") else text
    else:
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(name, text, f"is not a valid value: {' '.join(str(error).split())}") from error
    for part in reversed(path):
        value = {part: value}
    return _checked_sections(value)


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back to an equal `Config`."""
    return write_yaml(config.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class Change:
    """A setting of two configs that is not the same in both."""

    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}"


def changed_settings(before: str, after: str) -> dict[str, Change]:
    """How two texts of `dump_config` differ, by dotted name of the setting.

    A setting that one of them lacks (another version wrote it) is left out; so all are, of an empty text.
    """
    old, new = (dict(_leaves(parse_yaml(text) or {}, "")) for text in (before, after))
    return {
        name: Change(old[name], value) for name, value in new.items() if name in old and old[name] != value
    }


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{name}.{key}" if name else str(key))


def _checked_sections(layer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Refuses unknown sections and keys with a suggestion; an empty section is an empty mapping."""
    problems: list[ConfigError] = []
    checked: dict[str, dict[str, Any]] = {}
    for section, content in layer.items():
        if section not in FIELDS:
            rule = f"there is no section of this name; sections: {', '.join(SECTIONS)}"
            problems.append(ConfigError(str(section), content, rule, nearest_setting(str(section))))
        elif content is not None and not isinstance(content, Mapping):
            problems.append(
                ConfigError(section, content, "must be a mapping of settings", f"{section}.KEY: VALUE")
            )
        else:
            checked[section] = dict(content or {})
            problems += [
                ConfigError(
                    f"{section}.{key}",
                    value,
                    f"section {section} has no such key",
                    nearest_setting(f"{section}.{key}"),
                )
                for key, value in checked[section].items()
                if key not in FIELDS[section]
            ]
    if problems:
        raise ConfigError.join(problems)
    return checked


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = _copied(value)


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _apply_preset(merged: dict[str, Any]) -> None:
    written = merged.setdefault("algorithm", {})
    name = written.get("name", FIELDS["algorithm"]["name"].default)
    if isinstance(name, str) and name in PRESETS:
        chosen = {key: value for key, value in written.items() if value is not None}
        merged["algorithm"] = {**PRESETS[name], **chosen}


def _holds_text(path: Sequence[str]) -> bool:
    field = FIELDS.get(path[0], {}).get(path[1])
    if field is None or len(path) != 2:
        return False
    annotation = field.annotation
    kinds = get_args(annotation) or (annotation,)
    return get_origin(annotation) is not Literal and str in kinds


def _validate(merged: Mapping[str, Any]) -> Config:
    # strict JSON mode converts nothing silently, yet takes a list for a tuple and 1 for 1.0, as YAML means them
    try:
        text = json.dumps(merged, default=os.fspath)
    except TypeError as error:
        raise ConfigError("config", None, f"holds a value YAML could not hold: {error}") from error
    try:
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError.join([_translated(detail) for detail in error.errors()]) from error


def _translated(detail: ErrorDetails) -> ConfigError:
    location = [str(part) for part in detail["loc"] if not str(part).startswith("function-")]
    value, context = detail["input"], detail.get("ctx", {})
    nearest: str | None = None
    if location[:2] == ["reward", "sources"] and len(location) > 2:
        return source_problem(detail)
    if detail["type"] == "literal_error":
        field = FIELDS[location[0]].get(location[1])
        choices = [str(choice) for choice in _choices(field.annotation if field else None)]
        close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
        nearest = close[0] if close else None
        return ConfigError(".".join(location), value, f"must be one of {', '.join(choices)}", nearest)
    for bound in ("ge", "le"):
        if bound in context:
            nearest = str(context[bound])
    if detail["type"].endswith("_type") and isinstance(value, str) and "string" not in detail["type"]:
        number = parse_number(value)
        nearest = None if number is None else f"{number} without quotes"
    if detail["type"] == "string_type":
        nearest = None if value is None else f"'{value}' in quotes"
    rule = detail["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    return ConfigError(".".join(location), value, rule[:1].lower() + rule[1:], nearest)


def parse_number(text: str) -> int | float | None:
    """The number a text spells, or None."""
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ConfigError):
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for inner in get_args(annotation) for choice in _choices(inner))


def _near(path: Path) -> str | None:
    if path.exists() or not path.parent.is_dir():
        return None
    recipes = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    close = difflib.get_close_matches(path.name, recipes, n=1)
    return str(path.parent / close[0]) if close else None


def explain() -> list[tuple[str, str, str, str]]:
    """(dotted name, type, default, description) of every setting, in the schema's order."""
    return [row for section, fields in FIELDS.items() for row in _explained(section, fields)]


def _explained(section: str, fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, str, str, str]]:
    for key, field in fields.items():
        default, kind = field.get_default(call_default_factory=True), field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):  # a section within the section
            yield from _explained(f"{section}.{key}", kind.model_fields)
            continue
        shown = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
        shown = shown.replace("typing.", "")
        text = " ".join((field.description or "").split())
        yield f"{section}.{key}", shown, json.dumps(default, default=_plain), text


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)
