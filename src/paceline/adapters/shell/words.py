"""Text to tokens: words as written (quotes and `$` still in them), operators and redirections."""

import re
from dataclasses import dataclass
from typing import Literal

from paceline.adapters.shell.errors import ShellSyntaxError

TokenKind = Literal["word", "operator", "newline", "redirect"]

_OPERATORS = ("&&", "||", ";;", "|&", ";", "&", "|", "(", ")")
_REDIRECTS = ("<<<", "<<-", "&>>", ">>", "<<", ">&", "<&", "&>", ">|", "<>", ">", "<")
_ENDS_WORD = frozenset(" \t\n;&|<>()")
_ARRAY_START = re.compile(r"^[A-Za-z_]\w*\+?=$")


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the script; `line` counts from 1."""

    kind: TokenKind
    text: str
    line: int


def tokenize(script: str) -> list[Token]:
    """The script's tokens; comments, line continuations and the bodies of here-documents are left out.

    Raises:
        ShellSyntaxError: a quote or bracket is never closed.
    """
    return _Tokenizer(script).run()


class _Tokenizer:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.tokens: list[Token] = []
        self.here_documents: list[str] = []

    def run(self) -> list[Token]:
        while self.at < len(self.text):
            self._next()
        self.tokens.append(Token("newline", "\n", self.line))
        return self.tokens

    def _next(self) -> None:
        character = self.text[self.at]
        if self.text.startswith("\\\n", self.at):
            self.at, self.line = self.at + 2, self.line + 1
        elif character == "\n":
            self._newline()
        elif character in " \t\r":
            self.at += 1
        elif character == "#":
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif redirect := self._redirect_here():
            self._take_redirect(redirect)
        elif operator := next((o for o in _OPERATORS if self.text.startswith(o, self.at)), None):
            self._emit("operator", operator)
            self.at += len(operator)
        else:
            self._word()

    def _newline(self) -> None:
        self._emit("newline", "\n")
        self.at, self.line = self.at + 1, self.line + 1
        while self.here_documents:
            self._skip_here_document(self.here_documents.pop(0))

    def _skip_here_document(self, delimiter: str) -> None:
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            content = self.text[self.at : end]
            self.at, self.line = min(end + 1, len(self.text)), self.line + 1
            if content.strip("\t") == delimiter:
                return

    def _redirect_here(self) -> str | None:
        if self.text.startswith(("<(", ">("), self.at):
            return None
        return next((r for r in _REDIRECTS if self.text.startswith(r, self.at)), None)

    def _take_redirect(self, redirect: str) -> None:
        previous = self.tokens[-1] if self.tokens else None
        is_adjacent = self.at > 0 and self.text[self.at - 1].isdigit()
        if previous and previous.kind == "word" and previous.text.isdigit() and is_adjacent:
            self.tokens.pop()  # the 2 of 2>&1 is a file number, not an argument
        self._emit("redirect", redirect)
        self.at += len(redirect)
        if redirect in ("<<", "<<-"):
            match = re.compile(r"[ \t]*(['\"]?)([\w.-]+)\1").match(self.text, self.at)
            if match:
                self.here_documents.append(match.group(2))

    def _word(self) -> None:
        start, first_line = self.at, self.line
        parts: list[str] = []
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                parts.append(self.text[start : self.at])
                self.at, self.line = self.at + 2, self.line + 1
                start = self.at
                continue
            character = self.text[self.at]
            so_far = "".join(parts) + self.text[start : self.at]
            if character == "(" and _ARRAY_START.match(so_far):
                self._skip_to(end_of_bracket(self.text, self.at, "(", ")"))
            elif character in "<>" and self.text[self.at + 1 : self.at + 2] == "(":
                self._skip_to(end_of_bracket(self.text, self.at + 1, "(", ")"))
            elif character in _ENDS_WORD or character == "\r":
                break
            else:
                self._skip_to(end_of_element(self.text, self.at))
        parts.append(self.text[start : self.at])
        self.tokens.append(Token("word", "".join(parts), first_line))

    def _skip_to(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _emit(self, kind: TokenKind, text: str) -> None:
        self.tokens.append(Token(kind, text, self.line))


def end_of_element(text: str, at: int) -> int:
    """Index after the quoted, escaped, expanded or plain character that begins at `at`."""
    character = text[at]
    if character == "\\":
        return min(at + 2, len(text))
    if character == "'":
        return _after(text, text.find("'", at + 1), at)
    if character == '"':
        return _end_of_double_quotes(text, at)
    if character == "`":
        return _after(text, text.find("`", at + 1), at)
    if character == "$" and at + 1 < len(text):
        if text[at + 1] == "(":
            return end_of_bracket(text, at + 1, "(", ")")
        if text[at + 1] == "{":
            return end_of_bracket(text, at + 1, "{", "}")
        if text[at + 1] == "'":
            return _after(text, text.find("'", at + 2), at)
    return at + 1


def _after(text: str, found: int, start: int) -> int:
    if found < 0:
        raise ShellSyntaxError(f"line {text.count(chr(10), 0, start) + 1}: a quote is never closed")
    return found + 1


def _end_of_double_quotes(text: str, start: int) -> int:
    at = start + 1
    while at < len(text):
        if text[at] == '"':
            return at + 1
        at = at + 1 if text[at] == "'" else end_of_element(text, at)
    raise ShellSyntaxError(f"line {text.count(chr(10), 0, start) + 1}: a quote is never closed")


def end_of_bracket(text: str, start: int, opening: str, closing: str) -> int:
    """Index after the bracket that closes the one at `start`, quotes and nesting respected."""
    depth, at = 0, start
    while at < len(text):
        character = text[at]
        if character == opening:
            depth, at = depth + 1, at + 1
        elif character == closing:
            depth, at = depth - 1, at + 1
            if depth == 0:
                return at
        elif character == "#" and opening == "(" and text[at - 1] in " \t\n":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            at = end_of_element(text, at)
    raise ShellSyntaxError(f"line {text.count(chr(10), 0, start) + 1}: {opening} is never closed")
