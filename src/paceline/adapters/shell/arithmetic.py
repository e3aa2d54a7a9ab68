"""Integer arithmetic of `$(( ))`."""

import ast
import operator
import re
from collections.abc import Callable

Lookup = Callable[[str], str | None]

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_MAX_DEPTH = 20
_LARGEST = 2**63


class _UnknownError(Exception):
    pass


def evaluate(expression: str, lookup: Lookup, depth: int = 0) -> int | None:
    """The value, or None where it depends on what is unknown or is no arithmetic. `lookup` gives a variable's text."""
    text = expression.strip()
    if not text:
        return 0
    python = text.replace("&&", " and ").replace("||", " or ")
    python = re.sub(r"!(?!=)", " not ", python)
    try:
        value = _value(ast.parse(python.strip(), mode="eval").body, lookup, depth)
    except (SyntaxError, ValueError, _UnknownError, RecursionError):
        return None
    return value if abs(value) < _LARGEST else None


def _value(node: ast.expr, lookup: Lookup, depth: int) -> int:
    match node:
        case ast.Constant(value=bool()):
            raise _UnknownError
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return _variable(name, lookup, depth)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left, lookup, depth), _value(right, lookup, depth))
        case ast.UnaryOp(op=op, operand=operand):
            return _unary(op, _value(operand, lookup, depth))
        case ast.BoolOp(op=op, values=values):
            truths = [_value(value, lookup, depth) != 0 for value in values]
            return int(all(truths) if isinstance(op, ast.And) else any(truths))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return int(_COMPARE[type(op)](_value(left, lookup, depth), _value(right, lookup, depth)))
    raise _UnknownError


def _variable(name: str, lookup: Lookup, depth: int) -> int:
    text = lookup(name)
    if text is None or depth >= _MAX_DEPTH:
        raise _UnknownError
    value = evaluate(text, lookup, depth + 1)
    if value is None:
        raise _UnknownError
    return value


def _binary(op: ast.operator, left: int, right: int) -> int:
    if isinstance(op, ast.Div | ast.Mod):
        if right == 0:
            raise _UnknownError
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards zero, as in C
        return quotient if isinstance(op, ast.Div) else left - quotient * right
    if isinstance(op, ast.Pow) and 0 <= right <= 64:
        return left**right
    if type(op) not in _BINARY or (isinstance(op, ast.LShift | ast.RShift) and not 0 <= right < 64):
        raise _UnknownError
    return _BINARY[type(op)](left, right)


def _unary(op: ast.unaryop, value: int) -> int:
    if isinstance(op, ast.USub):
        return -value
    if isinstance(op, ast.Not):
        return int(value == 0)
    if isinstance(op, ast.Invert):
        return ~value
    return value
