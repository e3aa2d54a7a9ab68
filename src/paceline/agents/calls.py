"""An answer's text to the calls in it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

CallFormat: TypeAlias = Literal["json", "tag"]

_JSON_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What was meant as a call and is none; the model is told why."""

    reason: str


def parse_calls(
    text: str, call_format: CallFormat, parameters: Mapping[str, Sequence[str]]
) -> list[ToolCall | MalformedCall]:
    """Calls in order of their appearance; `parameters` are the tools' by name. No call is an empty list."""
    if call_format == "json":
        return [_json_call(body, parameters) for body in _JSON_CALL.findall(text)]
    names = "|".join(re.escape(name) for name in parameters)
    found = re.finditer(rf"<({names})>(.*?)</\1>", text, re.DOTALL)
    return [ToolCall(m[1], {parameters[m[1]][0]: m[2].strip()}) for m in found]


def _json_call(body: str, parameters: Mapping[str, Sequence[str]]) -> ToolCall | MalformedCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return MalformedCall('a call is an object with "name" and "arguments"')
    name, arguments = call["name"], call.get("arguments", {})
    if name not in parameters:
        return MalformedCall(f"there is no tool {name!r}; there is {', '.join(parameters)}")
    if not isinstance(arguments, dict) or set(arguments) - set(parameters[name]):
        return MalformedCall(f"{name} takes {', '.join(parameters[name]) or 'no arguments'}")
    return ToolCall(name, arguments)
