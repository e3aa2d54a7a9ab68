"""Numbers are shortened without claiming more than is true."""

import math

import pytest

from paceline.report import formats


def plain(text):
    return text.replace("\u202f", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0 %"),
        (0.0002, "< 0.1 %"),
        (0.4637, "46.4 %"),
        (0.9996, "99.96 %"),
        (0.999999, "> 99.99 %"),
        (1.0, "100 %"),
        (1.9, "190.0 %"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_a_share_is_all_or_nothing_only_when_it_is(value, text):
    assert plain(formats.share(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.8e-5, "38 µs"),
        (0.412, "412 ms"),
        (6.214, "6.21 s"),
        (252, "4 min 12 s"),
        (7500, "2 h 05 min"),
        (0, "0 s"),
        (None, "–"),
    ],
)
def test_durations_carry_the_unit_people_would_use(value, text):
    assert plain(formats.seconds(value)) == text


def test_counts_and_bytes_get_prefixes():
    assert plain(formats.quantity(1234)) == "1,234"
    assert plain(formats.quantity(4.1e12, "FLOP")) == "4.10 TFLOP"
    assert plain(formats.memory(1.5 * 2**30)) == "1.50 GiB"
    assert plain(formats.number(1e-8)) == "1.00e-08"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (2.0, 3.0, "+50.0 %"),
        (2.0, 1.0, "−50.0 %"),
        (1.0, 0.9999, "0 %"),
        (1.0, 10.0, "× 10.0"),
        (4.0, 0.0, "−100.0 %"),
    ],
)
def test_a_change_is_a_share_and_from_tenfold_on_a_factor(before: float, after: float, text: str) -> None:
    assert formats.change(before, after).replace("\u202f", " ") == text
