"""Every derived number, without a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import (
    ConfigError,
    allowed_new_tokens,
    batch_arithmetic,
    check_lengths,
    describe,
    load_config,
    stated_context,
)

BASE: dict[str, Any] = {"model": {"path": "org/model"}, "task": {"name": "word_sorting"}}


def test_sizes_follow_from_the_settings() -> None:
    config = load_config(
        None,
        [
            "run.num_steps=10",
            "run.eval_every=4",
            "batch.num_prompts=12",
            "batch.num_samples=8",
            "batch.mini_batch_prompts=4",
            "batch.num_epochs=2",
            "batch.token_budget=4096",
            "model.max_context=1024",
            "rollout.max_new_tokens=256",
            "task.eval_size=50",
            "task.eval_samples=2",
        ],
        base=BASE,
    )
    sizes = batch_arithmetic(config)
    assert sizes.samples_per_step == 96
    assert (sizes.mini_batches_per_rollout, sizes.samples_per_mini_batch) == (3, 32)
    assert (sizes.updates_per_step, sizes.total_updates, sizes.total_samples) == (6, 60, 960)
    assert (sizes.token_budget, sizes.forward_token_budget) == (4096, 8192)
    assert (sizes.longest_prompt, sizes.longest_sample) == (768, 1024)
    assert (sizes.max_tokens_per_step, sizes.max_response_tokens_per_step) == (96 * 1024, 96 * 256)
    assert sizes.max_micro_batches_per_update == 8
    # before the first step, after steps 4 and 8, after the last
    assert (sizes.num_evaluations, sizes.completions_per_evaluation, sizes.total_evaluation_completions) == (
        4,
        100,
        400,
    )


@pytest.mark.parametrize(
    ("steps", "every", "expected"), [(10, 0, 2), (10, 5, 3), (10, 10, 2), (10, 3, 5), (1, 1, 2)]
)
def test_an_evaluation_due_after_the_last_step_is_the_last_one(steps: int, every: int, expected: int) -> None:
    config = load_config(None, [f"run.num_steps={steps}", f"run.eval_every={every}"], base=BASE)
    assert batch_arithmetic(config).num_evaluations == expected


def test_no_held_out_prompts_mean_no_evaluation() -> None:
    sizes = batch_arithmetic(load_config(None, ["task.eval_size=0"], base=BASE))
    assert (sizes.num_evaluations, sizes.total_evaluation_completions) == (0, 0)


def test_what_depends_on_an_unknown_context_is_unknown() -> None:
    config = load_config(None, base=BASE)
    sizes = batch_arithmetic(config)
    assert (sizes.max_context, sizes.longest_sample, sizes.max_tokens_per_step) == (None, None, None)
    assert sizes.max_micro_batches_per_update == sizes.samples_per_mini_batch
    assert batch_arithmetic(config, max_context=2048).longest_sample == 2048


@pytest.mark.parametrize(
    "content", [{"max_position_embeddings": 777}, {"text_config": {"max_position_embeddings": 777}}]
)
def test_the_context_is_read_from_a_local_model(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = load_config(None, [f"model.path={tmp_path}"], base=BASE)
    assert batch_arithmetic(config).max_context == stated_context(str(tmp_path)) == 777
    smaller = load_config(None, [f"model.path={tmp_path}", "model.max_context=500"], base=BASE)
    assert batch_arithmetic(smaller).max_context == 500


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_local_model_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_config(None, [f"model.path={tmp_path}"], base=BASE)


def test_a_long_prompt_shortens_its_response_to_what_the_context_leaves() -> None:
    assert allowed_new_tokens(2089, 2048, 4096) == 2007
    assert allowed_new_tokens(2048, 2048, 4096) == 2048
    assert allowed_new_tokens(4096, 2048, 4096) == 0
    assert allowed_new_tokens(5000, 2048, 4096) == 0
    assert allowed_new_tokens(5000, 2048, None) == 2048


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_prompt_and_response_never_exceed_the_context(prompt: int, new: int, context: int) -> None:
    room = allowed_new_tokens(prompt, new, context)
    assert 0 <= room <= new
    assert room == 0 or prompt + room <= context


def test_real_prompts_are_held_against_the_budget() -> None:
    config = load_config(None, ["batch.token_budget=1000", "rollout.max_new_tokens=600"], base=BASE)
    assert check_lengths(config, longest_prompt=400, max_context=None) == 1000
    with pytest.raises(ConfigError, match="a prompt of 401 and a response of 600"):
        check_lengths(config, longest_prompt=401, max_context=None)
    assert check_lengths(config, longest_prompt=401, max_context=1000) == 1000
    own = load_config(None, ["batch.token_budget=1000", "batch.overlong=own_micro_batch"], base=BASE)
    assert check_lengths(own, longest_prompt=5000, max_context=None) == 5256


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(100, 400))
def test_first_fit_never_needs_more_micro_batches_than_announced(lengths: list[int], budget: int) -> None:
    overrides = [
        "batch.num_prompts=1",
        f"batch.num_samples={max(2, len(lengths))}",
        f"batch.token_budget={budget}",
        "model.max_context=100",
        "rollout.max_new_tokens=50",
    ]
    announced = batch_arithmetic(load_config(None, overrides, base=BASE)).max_micro_batches_per_update
    bins: list[int] = []
    for length in lengths:
        room = next((index for index, used in enumerate(bins) if used + length <= budget), None)
        if room is None:
            bins.append(length)
        else:
            bins[room] += length
    assert len(bins) <= announced


def test_the_description_shows_the_arithmetic() -> None:
    text = describe(load_config(None, ["batch.num_prompts=6", "batch.num_samples=4"], base=BASE))
    assert "6 prompts x 4 samples = 24" in text
    assert "current (one update per rollout" in text
    assert all(len(line) < 140 for line in text.splitlines())
