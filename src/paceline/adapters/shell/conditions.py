"""`test`, `[ ]` and `[[ ]]` on known texts; None where the answer depends on the machine or on what is unknown."""

import fnmatch
from collections.abc import Sequence

from paceline.adapters.shell.expansion import is_known

_NUMERIC = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def truth(words: Sequence[str]) -> bool | None:
    """The result of a test; `words` are its expanded arguments without the brackets."""
    for operator, combine in (("||", _either), ("-o", _either), ("&&", _both), ("-a", _both)):
        if operator in words:
            at = words.index(operator)
            return combine(truth(words[:at]), truth(words[at + 1 :]))
    if words[:1] == ["!"]:
        inner = truth(words[1:])
        return None if inner is None else not inner
    if not all(is_known(word) for word in words):
        return None
    if len(words) == 1:
        return words[0] != ""
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return (words[1] != "") == (words[0] == "-n")
    if len(words) == 3:
        return _binary(*words)
    return None


def _binary(left: str, operator: str, right: str) -> bool | None:
    if operator in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (operator != "!=")
    if operator in _NUMERIC:
        try:
            return _NUMERIC[operator](int(left), int(right))
        except ValueError:
            return None
    return None


def _either(left: bool | None, right: bool | None) -> bool | None:
    if left or right:
        return True
    return None if None in (left, right) else False


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if None in (left, right) else True
