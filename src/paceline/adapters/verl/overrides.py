"""Hydra's override grammar: `key=value`, `+key=value`, `++key=value`, `~key`, with quotes, lists and mappings."""

import re
from dataclasses import dataclass
from typing import Any

_OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w./@-]*(?:\[[^\]]*\])?)(?:=(.*))?$", re.DOTALL)
_INT = re.compile(r"^[-+]?\d+(?:_\d+)*$")
_FLOAT = re.compile(
    r"^[-+]?(?:\d+(?:_\d+)*\.(?:\d+(?:_\d+)*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+(?:_\d+)*[eE][-+]?\d+|inf|nan)$",
    re.IGNORECASE,
)
_CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True, slots=True)
class Override:
    """One override. `prefix` is "", "+", "++" or "~"; `value` is None for null and for a deletion without a value.

    `text` is the value as written; `is_sweep` says that it lists several values for a multi-run, of which `value` is
    the first.
    """

    prefix: str
    key: str
    value: Any
    text: str
    is_sweep: bool = False


def parse_override(argument: str) -> Override | None:
    """The override an argument is, or None when it is none (an option, a file)."""
    match = _OVERRIDE.match(argument)
    if match is None:
        return None
    prefix, key, text = match.group(1) or "", match.group(2), match.group(3)
    if text is None:
        return Override(prefix, key, None, "") if prefix == "~" else None
    pieces = split_top_level(text)
    return Override(prefix, key, parse_value(pieces[0]), text, is_sweep=len(pieces) > 1)


def parse_value(text: str) -> Any:
    """The value a text stands for: null, bool, int, float, list, dict or text."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if text.startswith("[") and text.endswith("]"):
        return [parse_value(piece) for piece in split_top_level(text[1:-1]) if piece.strip()]
    if text.startswith("{") and text.endswith("}"):
        pairs = [_split_pair(piece) for piece in split_top_level(text[1:-1]) if piece.strip()]
        return {str(parse_value(key)): parse_value(value) for key, value in pairs}
    lowered = text.lower()
    if lowered in ("null", ""):
        return None if lowered else ""
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    return text


def split_top_level(text: str, separator: str = ",") -> list[str]:
    """Pieces between separators that lie in no quotes and no brackets."""
    pieces, start = [], 0
    closing: list[str] = []
    quote = ""
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[at - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == separator and not closing:
            pieces.append(text[start:at])
            start = at + 1
    pieces.append(text[start:])
    return pieces


def _split_pair(text: str) -> tuple[str, str]:
    key, *rest = split_top_level(text, ":")
    return key, ":".join(rest)
