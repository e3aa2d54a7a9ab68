"""How replicas agree: settings that would do nothing, or save nothing, are refused with the reason."""

from typing import Any

import pytest

from paceline.config import ConfigError, load_config


def train_of(train: dict[str, Any], batch: dict[str, Any] | None = None, replicas: int = 2):
    sections = {
        "model": {"path": "m"},
        "task": {"path": "prompts.jsonl"},
        "rollout": {"max_new_tokens": 32},
        "batch": {"num_prompts": 16, **(batch or {})},
        "cluster": {"num_devices": replicas, "replicate_size": replicas},
        "train": train,
    }
    return load_config(None, sections=sections).train


def test_exact_sums_are_the_default():
    train = train_of({})
    assert (train.gradient_sync, train.gradient_sync_every) == ("exact", 1)


@pytest.mark.parametrize(
    ("train", "batch"),
    [
        ({"gradient_sync": "int8"}, {}),
        ({"gradient_sync": "topk_int8", "gradient_sync_fraction": 0.02}, {}),
        ({"gradient_sync_every": 4}, {"mini_batch_prompts": 4}),
        ({"gradient_sync_every": 8}, {"mini_batch_prompts": 4, "num_epochs": 2}),
    ],
)
def test_settings_that_act_are_taken(train, batch):
    assert train_of(train, batch).model_dump(include=set(train)) == train


@pytest.mark.parametrize("train", [{"gradient_sync": "int8"}, {"gradient_sync_every": 4}])
def test_one_copy_of_the_weights_has_nobody_to_agree_with(train):
    with pytest.raises(ConfigError, match=r"cluster\.replicate_size is 1") as caught:
        train_of(train, {"mini_batch_prompts": 4}, replicas=1)
    assert caught.value.key == f"train.{next(iter(train))}"


@pytest.mark.parametrize(
    ("train", "key", "rule"),
    [
        ({"gradient_sync_fraction": 0.1}, "train.gradient_sync_fraction", "gradient_sync is exact"),
        (
            {"gradient_sync": "int8", "gradient_sync_fraction": 0.1},
            "train.gradient_sync_fraction",
            "gradient_sync is int8",
        ),
        ({"gradient_sync": "int8", "gradient_sync_every": 4}, "train.gradient_sync", "averages weights"),
        ({"gradient_sync_every": 2}, "train.gradient_sync_every", "three times the bytes"),
        ({"gradient_sync_every": 5}, "train.gradient_sync_every", "at most the 4 updates of a rollout"),
    ],
)
def test_settings_that_do_nothing_or_save_nothing_are_refused(train, key, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        train_of(train, {"mini_batch_prompts": 4})
    assert caught.value.key == key
