"""YAML as people mean it: `1e-6` is a number, `on` is a word, a key written twice is an error.

PyYAML follows YAML 1.1, where a float needs a point and a signed exponent (so `1e-6` is text), `on` and `no` are
booleans and `1:30` is ninety. The reader here resolves plain scalars by the core schema of YAML 1.2
(https://yaml.org/spec/1.2.2/#103-core-schema). The writer quotes whatever either version would misread.
"""

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

from paceline.config.errors import ConfigError

_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_MERGE = re.compile(r"^(?:<<)$")

# order matters: the first match wins, and every integer is also a float by its pattern
_CORE_RESOLVERS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("tag:yaml.org,2002:null", _NULL, "~nN\0"),
    ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:merge", _MERGE, "<"),
)


class RecipeLoader(yaml.SafeLoader):
    """Safe loader with the core schema's scalars that refuses duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own contract

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping; raises `ConfigError` when it holds a key twice."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    line = key_node.start_mark.line + 1
                    raise ConfigError(key_node.value, f"line {line}", "is written twice; keep one of them")
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _construct_int(loader: RecipeLoader, node: ScalarNode) -> int:
    # YAML 1.1 would read a leading zero as octal
    return int(loader.construct_scalar(node))


class RecipeDumper(yaml.SafeDumper):
    """Safe dumper that quotes text which either YAML version would take for another type."""


_UNICODE_BREAKS = re.compile("[\x85\u2028\u2029\ufeff]")


def _represent_text(dumper: RecipeDumper, text: str) -> ScalarNode:
    # the other quoting styles write these line breaks as they are, and a reader folds them into spaces
    style = '"' if _UNICODE_BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


RecipeDumper.add_representer(str, _represent_text)


def _add_resolvers() -> None:
    for tag, pattern, first in _CORE_RESOLVERS:
        characters = ["" if character == "\0" else character for character in first]
        RecipeLoader.add_implicit_resolver(tag, pattern, characters)
        RecipeDumper.add_implicit_resolver(tag, pattern, characters)
    RecipeLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_add_resolvers()


def parse_yaml(text: str) -> Any:
    """The document's value. Raises `yaml.YAMLError` on bad syntax and `ConfigError` on a duplicate key."""
    return yaml.load(text, Loader=RecipeLoader)  # a SafeLoader


def write_yaml(value: Any) -> str:
    """Block-style YAML in the given key order, which `parse_yaml` reads back to the same value."""
    return yaml.dump(value, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=110)
