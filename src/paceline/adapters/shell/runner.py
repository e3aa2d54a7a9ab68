"""Walks a script's commands, following variables and conditions, and notes what would be started. Starts nothing."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.adapters.shell.conditions import truth
from paceline.adapters.shell.errors import ShellSyntaxError
from paceline.adapters.shell.expansion import Expander, Variables, is_known
from paceline.adapters.shell.syntax import (
    AndOr,
    Block,
    Case,
    For,
    Function,
    If,
    Loop,
    Node,
    Pipeline,
    Simple,
    parse,
)
from paceline.adapters.shell.words import tokenize

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?=)(.*)$", re.DOTALL)
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
_IGNORED = frozenset(
    {"set", "echo", "printf", "cd", "mkdir", "ulimit", "shopt", "trap", "sleep", "wait", "pwd", "umask"}
)
_MAX_DEPTH = 20
_MAX_REPEATS = 64
_MAX_COMMANDS = 10_000
_MAX_FOLLOWED = 20_000


@dataclass(frozen=True, slots=True)
class Command:
    """A command the script would start: arguments, exported variables, the line it begins on."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    line: int


@dataclass(frozen=True, slots=True)
class ShellResult:
    """What was found. `unknown` are variables used and never set; `notes` say what was not followed."""

    commands: tuple[Command, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


class _StopError(Exception):
    """The script, or the function, ends here."""


class _LimitError(Exception):
    """More was followed than any launch needs."""


def read_script(script: str, environment: Mapping[str, str] | None = None) -> ShellResult:
    """The commands of `script`, given the environment variables it is started with.

    Where a condition depends on the machine or on an unknown variable, the `else` branch is followed and a note says
    so; loops over unknown lists are followed once.

    Raises:
        ShellSyntaxError: it is no shell script.
    """
    runner = _Runner(dict(environment or {}))
    if "\r\n" in script:
        runner.notes.append("lines end in a carriage return, which a shell takes for part of the last word")
        script = script.replace("\r\n", "\n")
    try:
        runner.run(parse(script))
    except (_StopError, _LimitError):
        pass
    except RecursionError as error:
        raise ShellSyntaxError("commands are nested too deeply") from error
    return ShellResult(tuple(runner.commands), tuple(runner.variables.unknown), tuple(runner.notes))


def _is_test(node: Node) -> bool:
    return isinstance(node, Simple) and node.words[:1] in (("[",), ("[[",), ("test",))


def _line_of(node: Node) -> int:
    return node.line if isinstance(node, Simple) else 0


def _decided_by(right: bool | None, operator: str) -> bool | None:
    """The result of an unknown test joined with `right`: only one value of it decides."""
    decisive = operator == "||"
    return decisive if right is decisive else None


@dataclass(slots=True)
class _Runner:
    exported: dict[str, str]
    variables: Variables = field(default_factory=Variables)
    functions: dict[str, Node] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    depth: int = 0
    num_followed: int = 0
    expander: Expander = field(init=False)

    def __post_init__(self) -> None:
        self.variables.values.update(self.exported)
        self.expander = Expander(self.variables, self._output_of)

    def run(self, node: Node) -> bool | None:
        """Follows a node; whether it succeeds, None where that is unknown."""
        match node:
            case Simple():
                return self._simple(node)
            case Block(commands=commands):
                return self._last([self.run(command) for command in commands])
            case Pipeline(commands=commands, negated=negated):
                status = self._last([self.run(command) for command in commands])
                return (None if status is None else not status) if negated else status
            case AndOr():
                return self._and_or(node)
            case If():
                return self._if(node)
            case Case():
                return self._case(node)
            case For():
                return self._for(node)
            case Loop(body=body, line=line):
                self.notes.append(f"line {line}: a while loop is followed once")
                return self.run(body)
            case Function(name=name, body=body):
                self.functions[name] = body
                return True

    def _last(self, statuses: Sequence[bool | None]) -> bool | None:
        return statuses[-1] if statuses else True

    def _and_or(self, node: AndOr) -> bool | None:
        status, previous = self.run(node.first), node.first
        for operator, following in node.rest:
            if status is None and _is_test(previous):
                if _is_test(following):
                    right = self.run(following)
                    status = _decided_by(right, operator)
                    continue
                self.notes.append(
                    f"line {_line_of(previous)}: a test depends on the machine; what it guards is left out"
                )
                return None
            # a command that is not understood is taken to succeed, as it does in a script that works
            if (operator == "&&" and status is not False) or (operator == "||" and status is False):
                right = self.run(following)
                status = None if status is None and right is not False else right
                previous = following
        return status

    def _if(self, node: If) -> bool | None:
        is_certain = True
        for condition, body in node.branches:
            status = self.run(condition)
            if status:
                return self.run(body)
            is_certain = is_certain and status is not None
        if not is_certain:
            taken = "the branch after else is followed" if node.otherwise else "its body is left out"
            self.notes.append(f"line {node.line}: the condition of if depends on the machine; {taken}")
        return self.run(node.otherwise) if node.otherwise else True

    def _case(self, node: Case) -> bool | None:
        word = self.expander.text(node.word)
        if not is_known(word):
            self.notes.append(f"line {node.line}: {word} is not known, so no branch of case is followed")
            return None
        for patterns, body in node.branches:
            if any(fnmatch.fnmatchcase(word, self.expander.text(pattern)) for pattern in patterns):
                return self.run(body)
        return True

    def _for(self, node: For) -> bool | None:
        values = [] if node.words is None else self.expander.fields(node.words)
        if len(values) > _MAX_REPEATS:
            self.notes.append(
                f"line {node.line}: of {len(values)} repeats the first {_MAX_REPEATS} are followed"
            )
        status: bool | None = True
        for value in values[:_MAX_REPEATS]:
            if node.name:
                self.variables.values[node.name] = value
            status = self.run(node.body)
        if not values:
            self.notes.append(f"line {node.line}: the values of for are not known; its body is followed once")
            status = self.run(node.body)
        return status

    def _simple(self, node: Simple) -> bool | None:
        self.num_followed += 1
        if self.num_followed > _MAX_FOLLOWED:
            self.notes.append(f"line {node.line}: not followed further after {_MAX_FOLLOWED:,} commands")
            raise _LimitError
        words = list(node.words)
        own: dict[str, str] = {}
        assignments: list[str] = []
        while words and _ASSIGNMENT.match(words[0]):
            assignments.append(words.pop(0))
        if not words:
            for assignment in assignments:
                self._assign(assignment)
            return True
        for assignment in assignments:
            match = _ASSIGNMENT.match(assignment)
            if match:
                own[match.group(1)] = self.expander.text(match.group(4))
        if words[0] in _DECLARATIONS:
            return self._declare(words)
        if words[0] in ("[", "[[", "test"):
            closing = {"[": "]", "[[": "]]"}.get(words[0])
            inner = words[1:-1] if words[-1] == closing else words[1:]
            return truth([self.expander.text(word) for word in inner])
        return self._command(self.expander.fields(words), own, node.line)

    def _command(self, arguments: list[str], own: Mapping[str, str], line: int) -> bool | None:
        if not arguments:
            return True
        name = arguments[0]
        if name in ("exit", "return", "exec") and len(arguments) <= 2 and name != "exec":
            raise _StopError
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name == "unset":
            for unset in arguments[1:]:
                self.variables.values.pop(unset, None)
                self.exported.pop(unset, None)
            return True
        if name == "shift":
            if self.variables.positional:
                self.variables.positional.pop(0)
            return True
        if name in ("source", "."):
            self.notes.append(f"line {line}: {' '.join(arguments[:2])} is not read; what it sets is unknown")
            return None
        if name in self.functions and self.depth < _MAX_DEPTH:
            return self._call(name, arguments[1:])
        if name in _IGNORED or len(self.commands) >= _MAX_COMMANDS:
            return None if name not in _IGNORED else True
        self.commands.append(Command(tuple(arguments), {**self._environment(), **own}, line))
        return None

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        outer, self.variables.positional = self.variables.positional, arguments
        self.depth += 1
        try:
            return self.run(self.functions[name])
        except _StopError:
            return None  # a return, or an exit that only a run could tell from it
        finally:
            self.depth -= 1
            self.variables.positional = outer

    def _environment(self) -> dict[str, str]:
        return {name: self.variables.text(name) or "" for name in self.exported}

    def _declare(self, words: Sequence[str]) -> bool:
        for word in words[1:]:
            if word.startswith("-"):
                continue
            match = _ASSIGNMENT.match(word)
            if match:
                self._assign(word)
            name = match.group(1) if match else self.expander.text(word)
            if words[0] == "export" and (match or name in self.variables.values):
                self.exported[name] = self.variables.text(name) or ""
        return True

    def _assign(self, assignment: str) -> None:
        match = _ASSIGNMENT.match(assignment)
        if match is None:
            return
        name, index, operator, raw = match.groups()
        values = self.variables.values
        if raw.startswith("(") and raw.endswith(")"):
            new = self.expander.fields([t.text for t in tokenize(raw[1:-1]) if t.kind != "newline"])
            old = values.get(name, [])
            values[name] = [*([old] if isinstance(old, str) else old), *new] if operator == "+=" else new
            return
        text = self.expander.text(raw)
        present = values.get(name)
        if index is not None or isinstance(present, list):
            array = [present] if isinstance(present, str) else list(present or [])
            values[name] = [*array, text] if operator == "+=" or index is not None else [text]
            return
        values[name] = (present or "") + text if operator == "+=" else text

    def _output_of(self, command: str) -> str | None:
        """The output of the few commands whose output follows from their arguments."""
        try:
            tree = parse(command)
        except ShellSyntaxError:
            return None
        match tree.commands:
            case (Simple(words=words),):
                arguments = self.expander.fields(words)
            case _:
                return None
        if not all(is_known(argument) for argument in arguments):
            return None
        match arguments:
            case ["echo", *rest]:
                return " ".join(rest)
            case ["basename", path]:
                return path.rstrip("/").rsplit("/", 1)[-1]
            case ["basename", path, suffix]:
                return path.rstrip("/").rsplit("/", 1)[-1].removesuffix(suffix)
            case ["dirname", path]:
                return path.rstrip("/").rsplit("/", 1)[0] if "/" in path.rstrip("/") else "."
        return None
