"""Hydra's override grammar."""

from typing import Any

import pytest

from paceline.adapters.verl.overrides import parse_override


@pytest.mark.parametrize(
    ("argument", "prefix", "key", "value"),
    [
        ("a.b=1", "", "a.b", 1),
        ("a.b=1e-6", "", "a.b", 1e-6),
        ("a.b=1_000", "", "a.b", 1000),
        ("a.b=.5", "", "a.b", 0.5),
        ("+a.b=True", "+", "a.b", True),
        ("++a.b=false", "++", "a.b", False),
        ("a.b=null", "", "a.b", None),
        ("a.b=", "", "a.b", ""),
        ("a.b='x, y'", "", "a.b", "x, y"),
        ("a.b=[1, 2.5, 'c d', null]", "", "a.b", [1, 2.5, "c d", None]),
        ('a.b=["console","wandb"]', "", "a.b", ["console", "wandb"]),
        ("a.b={x: 1, y: [a, b]}", "", "a.b", {"x": 1, "y": ["a", "b"]}),
        ("a.b=/p/q=r", "", "a.b", "/p/q=r"),
        ("~a.b", "~", "a.b", None),
        ("trainer@cfg=big", "", "trainer@cfg", "big"),
        ("a.b=${c.d}", "", "a.b", "${c.d}"),
    ],
)
def test_an_override_is_read_as_hydra_reads_it(argument: str, prefix: str, key: str, value: Any) -> None:
    override = parse_override(argument)
    assert override is not None
    assert (override.prefix, override.key, override.value) == (prefix, key, value)
    assert not override.is_sweep


def test_several_values_are_a_sweep_of_which_the_first_is_taken() -> None:
    override = parse_override("a.b=1,2,3")
    assert override is not None
    assert (override.value, override.is_sweep) == (1, True)


@pytest.mark.parametrize("argument", ["--config-name=x", "-m", "script.py", "a.b", "=x"])
def test_other_arguments_are_no_overrides(argument: str) -> None:
    assert parse_override(argument) is None
