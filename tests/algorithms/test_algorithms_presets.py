"""Every algorithm's preset names what is there, in full."""

from typing import get_args

import pytest
from algorithm_cases import settings_of

from paceline.algorithms.advantages import SCHEMES
from paceline.algorithms.losses import LOSSES
from paceline.config.presets import PRESETS
from paceline.config.schema import AlgorithmName, AlgorithmSection


def test_every_algorithm_has_a_preset() -> None:
    assert set(PRESETS) == set(get_args(AlgorithmName))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_every_field_that_is_open(name: str) -> None:
    open_fields = {key for key, field in AlgorithmSection.model_fields.items() if field.default is None}
    assert set(PRESETS[name]) == open_fields
    assert [key for key, value in PRESETS[name].items() if value is None] == ["dual_clip"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_a_scheme_and_a_loss_that_exist(name: str) -> None:
    settings = settings_of(name)
    assert settings.advantage in {*SCHEMES, "gae"} and settings.loss in LOSSES


@pytest.mark.parametrize("field", ["advantage", "loss"])
def test_the_settings_offer_what_the_registries_hold(field: str) -> None:
    offered = {
        choice
        for part in get_args(AlgorithmSection.model_fields[field].annotation)
        for choice in get_args(part)
    }
    assert offered == ({*SCHEMES, "gae"} if field == "advantage" else set(LOSSES))
