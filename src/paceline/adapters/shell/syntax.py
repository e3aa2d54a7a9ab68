"""Tokens to a tree of commands: lists, pipelines, `if`, `case`, `for`, `while`, functions and groups."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.adapters.shell.errors import ShellSyntaxError
from paceline.adapters.shell.words import Token, tokenize

__all__ = [
    "AndOr",
    "Block",
    "Case",
    "For",
    "Function",
    "If",
    "Loop",
    "Node",
    "Pipeline",
    "ShellSyntaxError",
    "Simple",
    "parse",
]


@dataclass(frozen=True, slots=True)
class Simple:
    """Words as written; leading assignments are still among them."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by `|`."""

    commands: tuple["Node", ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """Commands joined by `&&` and `||`."""

    first: "Node"
    rest: tuple[tuple[Literal["&&", "||"], "Node"], ...]


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with their bodies, in order, and what follows `else`."""

    branches: tuple[tuple["Block", "Block"], ...]
    otherwise: "Block | None"
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """`case WORD in PATTERN | PATTERN) BODY ;; esac`."""

    word: str
    branches: tuple[tuple[tuple[str, ...], "Block"], ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """`for NAME in WORDS`; words None for the positional parameters or an arithmetic loop."""

    name: str
    words: tuple[str, ...] | None
    body: "Block"
    line: int


@dataclass(frozen=True, slots=True)
class Loop:
    """`while` or `until`."""

    body: "Block"
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """A definition."""

    name: str
    body: "Node"


@dataclass(frozen=True, slots=True)
class Block:
    """Commands in order."""

    commands: tuple["Node", ...]


Node = Simple | Pipeline | AndOr | If | Case | For | Loop | Function | Block

_ENDS_OF_BLOCK = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


def parse(script: str) -> Block:
    """The script's commands. Raises `ShellSyntaxError` when it is not a shell script."""
    parser = _Parser(tokenize(script))
    block = parser.block()
    if parser.token is not None:
        raise ShellSyntaxError(f"line {parser.token.line}: {parser.token.text!r} closes nothing")
    return block


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at = tokens, 0

    @property
    def token(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def is_next(self, *texts: str) -> bool:
        token = self.token
        return token is not None and token.kind in ("word", "operator") and token.text in texts

    def take(self, *texts: str) -> Token:
        token = self.token
        if token is None or not self.is_next(*texts):
            line = self.tokens[-1].line if token is None else token.line
            raise ShellSyntaxError(f"line {line}: expected {' or '.join(texts)}")
        self.at += 1
        return token

    def skip_newlines(self) -> None:
        while self.token is not None and self.token.kind == "newline":
            self.at += 1

    def block(self) -> Block:
        commands: list[Node] = []
        while True:
            while self.token is not None and (self.token.kind == "newline" or self.is_next(";", "&")):
                self.at += 1
            if self.token is None or self.is_next(*_ENDS_OF_BLOCK, ")", ";;"):
                return Block(tuple(commands))
            commands.append(self.and_or())

    def and_or(self) -> Node:
        first = self.pipeline()
        rest: list[tuple[Literal["&&", "||"], Node]] = []
        while self.is_next("&&", "||"):
            operator: Literal["&&", "||"] = "&&" if self.take("&&", "||").text == "&&" else "||"
            self.skip_newlines()
            rest.append((operator, self.pipeline()))
        return AndOr(first, tuple(rest)) if rest else first

    def pipeline(self) -> Node:
        negated = self.is_next("!")
        if negated:
            self.at += 1
        commands = [self.command()]
        while self.is_next("|", "|&"):
            self.at += 1
            self.skip_newlines()
            commands.append(self.command())
        return commands[0] if len(commands) == 1 and not negated else Pipeline(tuple(commands), negated)

    def command(self) -> Node:
        token = self.token
        if token is None:
            raise ShellSyntaxError("the script ends where a command is expected")
        compounds: dict[str, Callable[[], Node]] = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "while": self._loop,
            "until": self._loop,
            "{": self._braces,
            "(": self._subshell,
            "function": self._function,
        }
        compound = compounds.get(token.text)
        if compound is not None and token.kind != "redirect":
            node = compound()
            self._skip_redirects()
            return node
        if token.kind == "word" and [t.text for t in self.tokens[self.at + 1 : self.at + 3]] == ["(", ")"]:
            self.at += 3
            self.skip_newlines()
            return Function(token.text, self.command())
        return self._simple()

    def _simple(self) -> Simple:
        words: list[str] = []
        line = self.tokens[self.at].line
        while self.token is not None and self.token.kind in ("word", "redirect"):
            if self.token.kind == "redirect":
                self._skip_redirects()
                continue
            if not words and self.token.text == "[[":
                return self._double_bracket()
            words.append(self.token.text)
            self.at += 1
        if not words and self.is_next("(", ")", "&&", "||", "|", ";;"):
            raise ShellSyntaxError(f"line {line}: {self.tokens[self.at].text!r} where a command is expected")
        return Simple(tuple(words), line)

    def _double_bracket(self) -> Simple:
        line, words = self.tokens[self.at].line, []
        while self.token is not None and self.token.kind != "newline":
            words.append(self.token.text)
            self.at += 1
            if words[-1] == "]]":
                return Simple(tuple(words), line)
        raise ShellSyntaxError(f"line {line}: [[ is never closed")

    def _skip_redirects(self) -> None:
        while (redirect := self.token) is not None and redirect.kind == "redirect":
            self.at += 1
            target = self.token
            if target is not None and target.kind == "word":
                self.at += 1

    def _if(self) -> If:
        line = self.take("if").line
        branches = []
        condition = self.block()
        self.take("then")
        branches.append((condition, self.block()))
        while self.is_next("elif"):
            self.at += 1
            condition = self.block()
            self.take("then")
            branches.append((condition, self.block()))
        otherwise = None
        if self.is_next("else"):
            self.at += 1
            otherwise = self.block()
        self.take("fi")
        return If(tuple(branches), otherwise, line)

    def _case(self) -> Case:
        line = self.take("case").line
        word = self._word()
        self.skip_newlines()
        self.take("in")
        self.skip_newlines()
        branches = []
        while not self.is_next("esac"):
            if self.is_next("("):
                self.at += 1
            patterns = [self._word()]
            while self.is_next("|"):
                self.at += 1
                patterns.append(self._word())
            self.take(")")
            branches.append((tuple(patterns), self.block()))
            if self.is_next(";;"):
                self.at += 1
            self.skip_newlines()
        self.take("esac")
        return Case(word, tuple(branches), line)

    def _for(self) -> For:
        line = self.take("for").line
        if self.is_next("("):  # for ((i = 0; ...)): its range is not evaluated
            while not self.is_next("do"):
                if self.token is None:
                    raise ShellSyntaxError(f"line {line}: for without do")
                self.at += 1
            return For("", None, self._do(), line)
        name = self._word()
        self.skip_newlines()
        words: list[str] | None = None
        if self.is_next("in"):
            self.at += 1
            words = []
            while self.token is not None and self.token.kind == "word":
                words.append(self._word())
        while self.token is not None and (self.token.kind == "newline" or self.is_next(";")):
            self.at += 1
        return For(name, None if words is None else tuple(words), self._do(), line)

    def _loop(self) -> Loop:
        line = self.take("while", "until").line
        self.block()
        return Loop(self._do(), line)

    def _do(self) -> Block:
        self.take("do")
        body = self.block()
        self.take("done")
        return body

    def _braces(self) -> Block:
        self.take("{")
        body = self.block()
        self.take("}")
        return body

    def _subshell(self) -> Block:
        self.take("(")
        if self.is_next("("):  # (( arithmetic )): changes at most a counter
            depth = 1
            while depth and self.token is not None:
                depth += {"(": 1, ")": -1}.get(self.token.text, 0)
                self.at += 1
            return Block(())
        body = self.block()
        self.take(")")
        return body

    def _function(self) -> Function:
        self.take("function")
        name = self._word()
        if self.is_next("("):
            self.at += 2
        self.skip_newlines()
        return Function(name, self.command())

    def _word(self) -> str:
        token = self.token
        if token is None or token.kind != "word":
            raise ShellSyntaxError(
                f"line {self.tokens[-1].line if token is None else token.line}: expected a word"
            )
        self.at += 1
        return token.text
