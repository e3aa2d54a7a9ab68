"""A calculator, as a tool."""

import ast
import operator
from collections.abc import Callable
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_LENGTH = 200


def calculator(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % and brackets; whole numbers without a decimal point.

    Raises:
        ValueError: it is something else.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"longer than {_MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError("not an expression") from error
    value = _value(tree.body)
    return str(int(value)) if float(value).is_integer() else f"{value:.10g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            found: int | float = _BINARY[type(op)](_value(left), _value(right))
            return found
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            signed: int | float = _UNARY[type(sign)](_value(operand))
            return signed
    raise ValueError("only numbers, + - * / // % and brackets")
