"""The calculator computes numbers and nothing else."""

import pytest

from paceline.agents.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        (" (1 - 10) // 2 ", "-5"),
        ("7/2", "3.5"),
        ("6 / 3", "2"),
        ("-3 + 10 % 4", "-1"),
        ("1/3", "0.3333333333"),
    ],
)
def test_arithmetic(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "2**99999", "x", "1,2", "'a'*9", "True", "", "1" * 201]
)
def test_anything_else_is_refused(expression):
    with pytest.raises(ValueError):
        calculator(expression)
