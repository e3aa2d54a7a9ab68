"""Words to arguments: quotes removed, parameters expanded, fields split. What is unknown stays as it is written."""

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.adapters.shell.arithmetic import evaluate
from paceline.adapters.shell.words import end_of_element

Value = str | list[str]

_NAME = re.compile(r"[A-Za-z_]\w*")
_SPECIAL = frozenset("@*#?-$!0123456789")
_OPERATOR = re.compile(r"^(:?[-=+?])(.*)$", re.DOTALL)
_MAX_DEPTH = 30
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


@dataclass(slots=True)
class Variables:
    """Values the script has set, positional parameters, and the names it used without setting them."""

    values: dict[str, Value] = field(default_factory=dict)
    positional: list[str] | None = None
    """None: the script's own arguments, which nobody knows."""
    unknown: dict[str, None] = field(default_factory=dict)
    """Names in the order of their first use; a dictionary because a set has no order."""

    def get(self, name: str) -> Value | None:
        """The value; None where the script does not set it."""
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        """The value as one text: an array's first element, as the shell takes it."""
        value = self.values.get(name)
        return (value[0] if value else "") if isinstance(value, list) else value


def is_known(text: str) -> bool:
    """Whether a text holds no expansion that could not be made."""
    return "${" not in text and "$(" not in text


class Expander:
    """Expands words against `variables`. `run` gives the output of a command substitution, or None."""

    def __init__(self, variables: Variables, run: Callable[[str], str | None]) -> None:
        self.variables, self._run = variables, run
        self._depth = 0

    def fields(self, words: Sequence[str]) -> list[str]:
        """The arguments the words become: none, one or several each."""
        return [one for word in words for one in self._word(word, split=True)]

    def text(self, word: str) -> str:
        """The word as one text, as in an assignment."""
        return " ".join(self._word(word, split=False))

    def _word(self, word: str, split: bool) -> list[str]:
        fields = _Fields(split)
        at = 0
        if word.startswith("~") and (len(word) == 1 or word[1] == "/"):
            fields.add("~", quoted=True)
            at = 1
        while at < len(word):
            end = end_of_element(word, at)
            piece = word[at:end]
            if piece.startswith("$'"):
                fields.add(_unescaped(piece[2:-1]), quoted=True)
            elif piece[0] == "'" and len(piece) > 1:
                fields.add(piece[1:-1], quoted=True)
            elif piece[0] == '"' and len(piece) > 1:
                self._double_quoted(piece[1:-1], fields)
            elif piece[0] == "\\":
                fields.add(piece[1:], quoted=True)
            elif piece[0] in "$`":
                end = self._dollar(word, at, fields, quoted=False)
            else:
                fields.add(piece, quoted=True)
            at = end
        return fields.finish()

    def _double_quoted(self, inner: str, fields: "_Fields") -> None:
        fields.add("", quoted=True)
        if inner in ("$@", "${@}") or re.fullmatch(r"\$\{\w+\[@\]\}", inner):
            fields.drop_if_empty()
        at = 0
        while at < len(inner):
            character = inner[at]
            if character == "\\" and at + 1 < len(inner):
                kept = inner[at + 1] if inner[at + 1] in '$`"\\' else inner[at : at + 2]
                fields.add(kept, quoted=True)
                at += 2
            elif character in "$`":
                at = self._dollar(inner, at, fields, quoted=True)
            else:
                fields.add(character, quoted=True)
                at += 1

    def _dollar(self, text: str, at: int, fields: "_Fields", quoted: bool) -> int:
        """Expands what begins with `$` or a backquote at `at`; returns the index after it."""
        end = end_of_element(text, at)
        if text[at] == "`":
            fields.add(self._substituted(text[at + 1 : end - 1]), quoted)
        elif text.startswith("$((", at) and text[end - 2 : end] == "))":
            fields.add(self._arithmetic(text[at + 3 : end - 2], text[at:end]), quoted)
        elif text.startswith("$(", at):
            fields.add(self._substituted(text[at + 2 : end - 1]), quoted)
        elif text.startswith("${", at):
            self._braced(text[at + 2 : end - 1], fields, quoted)
        else:
            match = _NAME.match(text, at + 1)
            special = text[at + 1 : at + 2]
            if match:
                self._add_value(match.group(), fields, quoted)
                return match.end()
            if special and special in _SPECIAL:
                self._add_special(special, fields, quoted)
                return at + 2
            fields.add("$", quoted)
            return at + 1
        return end

    def _arithmetic(self, expression: str, written: str) -> str:
        expression = self.text(expression) if "$" in expression else expression
        value = evaluate(expression, self.variables.text)
        if value is not None:
            return str(value)
        for name in _NAME.findall(expression):
            if self.variables.get(name) is None:
                self.variables.unknown[name] = None
        return "".join(written.split())  # without spaces, so that it stays one field

    def _substituted(self, command: str) -> str:
        output = self._run(command) if self._depth < _MAX_DEPTH else None
        if output is not None:
            return output
        name = command.split()[0] if command.split() else "..."
        return f"$({name})"  # without spaces, so that it stays one field

    def _add_special(self, special: str, fields: "_Fields", quoted: bool) -> None:
        positional = self.variables.positional
        if special in "@*":
            fields.add_all(positional or [], quoted and special == "@")
        elif special.isdigit() and special != "0" and positional is not None:
            index = int(special) - 1
            fields.add(positional[index] if index < len(positional) else "", quoted)
        elif special == "#" and positional is not None:
            fields.add(str(len(positional)), quoted)
        else:
            fields.add(f"${{{special}}}", quoted=True)

    def _add_value(self, name: str, fields: "_Fields", quoted: bool) -> None:
        value = self.variables.text(name)
        if value is None:
            self.variables.unknown[name] = None
            fields.add(f"${{{name}}}", quoted=True)
        else:
            fields.add(value, quoted)

    def _braced(self, inner: str, fields: "_Fields", quoted: bool) -> None:
        self._depth += 1
        try:
            self._braced_value(inner, fields, quoted)
        finally:
            self._depth -= 1

    def _braced_value(self, inner: str, fields: "_Fields", quoted: bool) -> None:
        if inner.startswith("#") and len(inner) > 1:
            fields.add(self._length(inner[1:]), quoted)
            return
        match = re.match(r"(!?)([A-Za-z_]\w*|[@*0-9#?$!-])(\[[^\]]*\])?(.*)$", inner, re.DOTALL)
        if match is None or self._depth > _MAX_DEPTH:
            fields.add(
                f"${{{inner}}}", quoted=True
            )  # an interpolation of Hydra's, or nothing the shell knows
            return
        indirect, name, index, rest = match.groups()
        if indirect:
            name = self.variables.text(name) or name
        if index in ("[@]", "[*]") or name in ("@", "*"):
            values = self.variables.positional or [] if name in ("@", "*") else self.variables.get(name)
            if values is None:
                self.variables.unknown[name] = None
            fields.add_all([values] if isinstance(values, str) else values or [], quoted and index != "[*]")
            return
        value = self._element(name, index)
        self._with_operator(name, value, rest, fields, quoted)

    def _element(self, name: str, index: str | None) -> str | None:
        if name in _SPECIAL:
            positional = self.variables.positional
            if positional is None or not name.isdigit() or name == "0":
                return None
            return positional[int(name) - 1] if int(name) <= len(positional) else ""
        value = self.variables.get(name)
        if not isinstance(value, list):
            return value
        number = evaluate(index[1:-1], self.variables.text) if index else 0
        return value[number] if number is not None and -len(value) <= number < len(value) else ""

    def _with_operator(
        self, name: str, value: str | None, rest: str, fields: "_Fields", quoted: bool
    ) -> None:
        operator = _OPERATOR.match(rest)
        if operator:
            kind, word = operator.groups()
            is_missing = value is None or (kind.startswith(":") and value == "")
            if kind.endswith("+"):
                fields.add("" if is_missing else self.text(word), quoted)
                return
            if is_missing and kind[-1] in "-=":
                default = self.text(word)
                if kind.endswith("="):
                    self.variables.values[name] = default
                fields.add(default, quoted)
                return
        if value is None:
            self.variables.unknown[name] = None
            fields.add(f"${{{name}{'' if operator else rest}}}", quoted=True)
        elif operator or not rest:
            fields.add(value, quoted)
        else:
            fields.add(self._edited(value, rest), quoted)

    def _length(self, name: str) -> str:
        if name in ("@", "*"):
            positional = self.variables.positional
            return "${#}" if positional is None else str(len(positional))
        base = name.removesuffix("[@]").removesuffix("[*]")
        value = self.variables.get(base)
        if value is None:
            self.variables.unknown[base] = None
            return f"${{#{name}}}"
        return str(len(value))

    def _edited(self, value: str, rest: str) -> str:
        if match := re.match(r"(##|#|%%|%)(.*)$", rest, re.DOTALL):
            return _trimmed(value, match.group(1), self.text(match.group(2)))
        if match := re.match(r"(//?)((?:[^/\\]|\\.)*)(?:/(.*))?$", rest, re.DOTALL):
            pattern, new = self.text(match.group(2)), self.text(match.group(3) or "")
            expression = fnmatch.translate(pattern).removesuffix(r"\z").removesuffix(r"\Z")
            return re.sub(expression, lambda _: new, value, count=0 if match.group(1) == "//" else 1)
        if match := re.match(r":(-?\d+)(?::(-?\d+))?$", rest):
            start, length = int(match.group(1)), match.group(2)
            return value[start:] if length is None else value[start:][: int(length)]
        if rest in ("^^", ",,"):
            return value.upper() if rest == "^^" else value.lower()
        return value


class _Fields:
    """Fields under construction."""

    def __init__(self, split: bool) -> None:
        self._split = split
        self._done: list[str] = []
        self._open: str | None = None

    def add(self, text: str, quoted: bool) -> None:
        if quoted or not self._split:
            self._open = (self._open or "") + text
            return
        pieces = text.split()
        if text[:1].isspace():
            self._close()
        for number, piece in enumerate(pieces):
            if number:
                self._close()
            self._open = (self._open or "") + piece
        if pieces and text[-1:].isspace():
            self._close()

    def add_all(self, values: Sequence[str], separate: bool) -> None:
        """Elements of an array: fields of their own when `separate`, else one text that is split as any other."""
        if not separate:
            self.add(" ".join(values), quoted=False)
            return
        for number, value in enumerate(values):
            if number:
                self._close()
            self._open = (self._open or "") + value

    def drop_if_empty(self) -> None:
        """Takes back an empty open field: an empty array in quotes is no argument at all."""
        if self._open == "":
            self._open = None

    def finish(self) -> list[str]:
        self._close()
        return self._done

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
        self._open = None


def _trimmed(value: str, kind: str, pattern: str) -> str:
    ends = range(len(value) + 1)
    if kind.startswith("#"):
        cuts = [end for end in ends if fnmatch.fnmatchcase(value[:end], pattern)]
        return value if not cuts else value[(max(cuts) if kind == "##" else min(cuts)) :]
    cuts = [start for start in ends if fnmatch.fnmatchcase(value[start:], pattern)]
    return value if not cuts else value[: (min(cuts) if kind == "%%" else max(cuts))]


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match.group(1), match.group()), text)
