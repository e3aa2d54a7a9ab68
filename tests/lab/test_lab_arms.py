"""What `--features` and `--combine` mean."""

import pytest

from paceline.config import ConfigError
from paceline.diagnosis.features import FEATURES, TOLERANCES
from paceline.lab.arms import combine, parse_features


def test_features_come_from_the_map_and_from_settings_of_ones_own() -> None:
    packing, wide, compiled = parse_features(
        ["packing,wide:batch.token_budget=8192,batch.pad_to=bucket,no_recompute"]
    )
    assert packing.keys == FEATURES["packing"].keys
    assert packing.tolerance.loss == FEATURES["packing"].tolerance["loss"]
    assert wide.keys == {"batch.token_budget": 8192, "batch.pad_to": "bucket"}
    assert wide.tolerance.loss is None
    assert compiled.name == "no_recompute"


def test_a_comma_inside_brackets_belongs_to_the_value() -> None:
    (arm,) = parse_features(["b:train.betas=[0.9, 0.99],train.lr=1e-5"])
    assert arm.keys == {"train.betas": [0.9, 0.99], "train.lr": 1e-5}


def test_features_may_be_given_one_by_one() -> None:
    assert [arm.name for arm in parse_features(["packing", "no_recompute"])] == ["packing", "no_recompute"]


def test_a_value_that_depends_on_the_run_has_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"write dynamic_batch:batch.token_budget=VALUE"):
        parse_features(["dynamic_batch"])
    (arm,) = parse_features(["dynamic_batch:batch.token_budget=4096"])
    assert arm.keys == {"batch.token_budget": 4096}
    assert arm.tolerance.loss == FEATURES["dynamic_batch"].tolerance["loss"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pakcing", "packing"),
        ("packing,packing", "another name"),
        ("baseline:train.lr=1", "another name"),
        ("a/b:train.lr=1", "letters"),
        ("train.lr=1", "settings follow a name"),
        ("x:train.learning_rate=1", "train.lr"),
        ("", "at least one"),
    ],
)
def test_what_cannot_be_a_feature_is_refused_with_what_would_do(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_features([text])


def test_a_combination_has_the_settings_of_its_parts() -> None:
    arms = parse_features(["packing,no_recompute,mine:train.lr=1e-5"])
    both, all_three = combine(arms, ["packing+no_recompute", "packing + no_recompute + mine"])
    assert both.name == "packing+no_recompute" and both.features == ("packing", "no_recompute")
    assert both.keys == {**arms[0].keys, **arms[1].keys}
    assert both.tolerance.loss == pytest.approx(
        FEATURES["packing"].tolerance["loss"] + FEATURES["no_recompute"].tolerance["loss"]
    )
    assert all_three.tolerance.loss is None  # one of its parts has none


def test_all_stands_for_every_feature() -> None:
    arms = parse_features(["packing,no_recompute,mine:train.lr=1e-5"])
    assert combine(arms, ["all"])[0].keys == combine(arms, ["packing+no_recompute+mine"])[0].keys
    assert combine(arms, ["all"])[0].name == "all"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("packing+unknown", "not in --features"),
        ("packing", "two or more"),
        ("packing+packing", "two or more"),
        ("packing+padded", "batch.layout"),
    ],
)
def test_what_cannot_be_combined_is_refused(text: str, message: str) -> None:
    arms = parse_features(["packing", "padded:batch.layout=padded"])
    with pytest.raises(ConfigError, match=message):
        combine(arms, [text])


def test_every_stated_tolerance_covers_loss_and_gradient() -> None:
    """A loss can be right while its gradient is not: with one update per rollout it does not depend on the weights."""
    stated = {id: feature.tolerance for id, feature in FEATURES.items() if feature.tolerance}
    assert {"packing", "share_prefixes", "skip_zero_advantage", "no_recompute"} <= stated.keys()
    assert all(tolerance.keys() == set(TOLERANCES) for tolerance in stated.values())
    assert not {"lora", "gradient_sync", "local_steps"} & stated.keys()  # these change the optimisation


def test_models_in_sixteen_bits_have_tolerances_of_their_own() -> None:
    (packing,) = parse_features(["packing:batch.layout=padded"])
    whole, half = packing.tolerance.at("float32"), packing.tolerance.at("bfloat16")
    assert whole.loss == FEATURES["packing"].tolerance["loss"]
    assert half.loss == FEATURES["packing"].tolerance["loss_16bit"]
    assert whole.loss is not None and half.loss is not None and half.loss > 10 * whole.loss
