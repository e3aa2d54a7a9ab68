"""Padding settings: each acts, or is refused with the setting that keeps it from acting."""

from typing import Any

import pytest

from paceline.config import ConfigError, load_config


def batch_of(batch: dict[str, Any], **sections: dict[str, Any]):
    base = {"model": {"path": "m"}, "task": {"path": "prompts.jsonl"}, "rollout": {"max_new_tokens": 32}}
    return load_config(None, sections={**base, **sections, "batch": batch}).batch


@pytest.mark.parametrize(
    "batch",
    [
        {"layout": "padded", "pad_to": "bucket", "buckets_per_doubling": 8, "pad_rows": 4},
        {"layout": "padded", "pad_to": "mini_batch", "pad_rows": 4},
        {"layout": "padded", "pad_length": 64},
        {"pack_multiple": 1024},
    ],
)
def test_settings_that_act_are_taken(batch):
    assert batch_of(batch).model_dump(exclude_defaults=True) == batch


@pytest.mark.parametrize(
    ("batch", "key", "rule"),
    [
        ({"pad_to": "mini_batch"}, "batch.pad_to", "no effect with batch.layout: packed"),
        ({"pad_length": 64}, "batch.pad_length", "no effect with batch.layout: packed"),
        ({"pad_rows": 2}, "batch.pad_rows", "no effect with batch.layout: packed"),
        ({"layout": "padded", "pack_multiple": 64}, "batch.pack_multiple", "no effect with batch.layout"),
        ({"layout": "padded", "buckets_per_doubling": 2}, "batch.buckets_per_doubling", "pad_to is micro"),
        ({"layout": "padded", "pad_to": "bucket", "pad_length": 64}, "batch.pad_to", "64 tokens wide"),
        (
            {"layout": "padded", "pad_length": 64, "overlong": "own_micro_batch"},
            "batch.overlong",
            "above batch.pad_length = 64 is an error",
        ),
        ({"layout": "padded", "pad_length": 9000}, "batch.token_budget", "batch.pad_length = 9000"),
        ({"layout": "padded", "pad_length": 20}, "batch.pad_length", "longest possible sample, 33 tokens"),
    ],
)
def test_settings_that_would_do_nothing_or_fail_later_are_refused(batch, key, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        batch_of(batch)
    assert caught.value.key == key


def test_a_forced_length_holds_the_longest_possible_sample_of_the_context():
    with pytest.raises(ConfigError, match="longest possible sample, 128 tokens") as caught:
        batch_of({"layout": "padded", "pad_length": 64}, model={"path": "m", "max_context": 128})
    assert (caught.value.key, caught.value.nearest) == ("batch.pad_length", "128")
