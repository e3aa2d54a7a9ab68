"""Shared prompts in training: used where the predicted saving exceeds what sharing costs."""

import pytest

from paceline.config import load_config
from paceline.config.decisions import SHARING_OVERHEAD, decide_prefix_sharing


def config(num_samples=8, max_new_tokens=256, **batch):
    return load_config(
        None,
        sections={
            "model": {"path": "tiny"},
            "task": {"path": "prompts.jsonl"},
            "batch": {"num_samples": num_samples, "token_budget": 65536, **batch},
            "rollout": {"max_new_tokens": max_new_tokens},
        },
    )


def test_long_prompts_of_a_group_are_shared_with_the_saving_of_their_positions():
    decision = decide_prefix_sharing(config(), 512)
    assert decision.shares
    positions = (512 + 8 * 256) / (8 * (512 + 256))
    assert decision.predicted_saving == pytest.approx(1 - (1 + SHARING_OVERHEAD) * positions)
    assert "512-token prompts" in decision.reason


def test_short_prompts_before_long_answers_are_not_worth_it():
    decision = decide_prefix_sharing(config(num_samples=2, max_new_tokens=4096), 20)
    assert not decision.shares and decision.predicted_saving < 0


@pytest.mark.parametrize("wanted", [True, False])
def test_what_a_recipe_asks_for_is_done(wanted):
    assert decide_prefix_sharing(config(share_prefixes=wanted), 512).shares is wanted


def test_the_padded_layout_cannot_share():
    assert not decide_prefix_sharing(config(layout="padded"), 512).shares
