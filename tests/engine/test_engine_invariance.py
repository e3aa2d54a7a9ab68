"""Cases 3, 4, 7, 8, 9, 11: the update does not depend on how its tokens are cut, packed, shared or padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from paceline.batching.micro_batches import OverBudgetError
from paceline.config import Config, load_config
from paceline.engine.samples import TrainSample
from paceline.engine.trainer import TrainEngine
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

HEADER = tuple(range(5, 25))


def config(**sections) -> Config:
    base = {
        "model": {"path": "tiny"},
        "task": {"path": "prompts.jsonl"},
        "batch": {"num_prompts": 3, "num_samples": 2, "token_budget": 512},
        "rollout": {"max_new_tokens": 8},
        # eps of the gradients' size: Adam's first step is else the sign of the gradient, and signs of zeros are noise
        "train": {"lr": 1e-2, "eps": 1e-2, "logprob_chunk": 64},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return load_config(None, sections=base)


def samples(masked=()) -> list[TrainSample]:
    generator = np.random.default_rng(0)
    found = []
    for prompt in range(3):
        prompt_ids = (*HEADER, *generator.integers(3, 90, 2 + prompt).tolist())
        for index in range(2):
            length = int(generator.integers(2, 8))
            mask = np.zeros(length) if (prompt, index) in masked else np.ones(length)
            found.append(
                TrainSample(
                    f"p{prompt}",
                    prompt_ids,
                    tuple(generator.integers(3, 90, length).tolist()),
                    mask.astype(np.float32),
                    np.full(length, generator.normal(), dtype=np.float32),
                    generator.normal(-2, 0.1, length).astype(np.float32),
                    generator.normal(-2, 0.3, length).astype(np.float32),
                    generator.normal(-2, 0.3, length).astype(np.float32),
                )
            )
    return found


def update(settings: Config, batch, family="llama", dtype=torch.float32, one_pass_head=None):
    """Metrics and parameters after one update from the same start."""
    model = tiny_model(family, dtype)
    engine = TrainEngine(model, settings, Ledger(), num_updates=1, one_pass_head=one_pass_head)
    metrics = MetricAccumulator()
    outcome = engine.update(batch, metrics)
    parameters = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return metrics.reduce(), parameters, outcome


INVARIANT = (
    "loss/total",
    "loss/policy",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "ratio/mean",
    "ratio/max",
    "kl/old",
)
OBJECTIVES = {
    "grpo": {"name": "grpo"},
    "token-mean": {"name": "grpo", "aggregation": "token-mean"},
    "dr_grpo": {"name": "dr_grpo"},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo"},
    "cispo": {"name": "cispo"},
    "kl-and-entropy": {"name": "grpo", "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "change",
    [
        {"batch": {"token_budget": 64}},
        {"batch": {"share_prefixes": False}},
        {"batch": {"share_prefixes": False, "token_budget": 40}},
        {"batch": {"layout": "padded"}},
        {"batch": {"layout": "padded", "pad_to": "mini_batch", "token_budget": 70}},
        {"train": {"logprob_chunk": 1}},
        {"train": {"gradient_checkpointing": True}},
        {"train": {"gradient_checkpointing": "selective", "selective_keep": "half_matmuls"}},
        {"train": {"activation_offload": True, "activation_offload_min_kb": 0}},
        {"batch": {"skip_zero_advantage": False}},
    ],
    ids=str,
)
def test_an_update_is_the_same_however_its_tokens_are_computed(objective, change):
    algorithm = {"algorithm": OBJECTIVES[objective]}
    expected, expected_parameters, _ = update(config(**algorithm), samples())
    found, parameters, _ = update(config(**algorithm, **change), samples())
    for name in INVARIANT:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    for name, parameter in expected_parameters.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=1e-4, atol=2e-4, msg=name)


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_head_and_loss_in_one_pass_give_the_same_update(objective, chunk):
    algorithm = {"algorithm": OBJECTIVES[objective]}
    expected, expected_parameters, _ = update(config(**algorithm), samples())
    settings = config(**algorithm, train={"logprob_chunk": chunk})
    found, parameters, _ = update(settings, samples(), one_pass_head=True)
    assert found.keys() == expected.keys()
    for name in INVARIANT:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    for name, parameter in expected_parameters.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=1e-4, atol=2e-4, msg=name)


def test_the_order_of_the_samples_does_not_matter():
    expected, _, _ = update(config(), samples())
    found, _, _ = update(config(), samples()[::-1])
    assert found["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_a_micro_batch_never_exceeds_the_budget_and_no_sample_is_lost():
    found, _, _ = update(config(batch={"token_budget": 32, "share_prefixes": False}), samples())
    assert found["micro_batches"] == 6  # 24 to 32 tokens each, so none fits beside another
    assert found["tokens/laid_out"] == sum(sample.num_tokens for sample in samples())


def test_a_sample_over_the_budget_is_refused_or_stands_alone_and_is_counted():
    with pytest.raises(OverBudgetError, match="exceeds the token budget of 25"):
        update(config(batch={"token_budget": 25}), samples())
    expected, _, _ = update(config(), samples())
    found, _, _ = update(config(batch={"token_budget": 25, "overlong": "own_micro_batch"}), samples())
    assert found["samples/overlong"] > 0
    assert found["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-5)


def test_samples_without_advantage_are_skipped_without_changing_the_update():
    batch = samples()
    still = [replace(s, advantages=s.advantages * 0) if s.prompt_id == "p1" else s for s in batch]
    found, parameters, _ = update(config(), still)
    expected, expected_parameters, _ = update(config(batch={"skip_zero_advantage": False}), still)
    assert found["samples/zero_advantage_skipped"] == 2
    assert found["tokens/laid_out"] < expected["tokens/laid_out"]
    assert found["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, parameter in expected_parameters.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=1e-4, atol=2e-4, msg=name)


def test_masked_samples_are_in_neither_numerator_nor_denominator():
    kept = [sample for sample in samples() if sample.prompt_id != "p2"]
    masked = samples(masked={(2, 0), (2, 1)})
    expected, expected_parameters, _ = update(config(), kept)
    found, parameters, _ = update(config(), masked)
    assert found["samples/masked"] == 2
    assert found["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-6)
    for name, parameter in expected_parameters.items():
        torch.testing.assert_close(parameters[name], parameter)


def test_a_mini_batch_without_a_loss_token_moves_nothing_and_is_counted():
    everything = {(prompt, index) for prompt in range(3) for index in range(2)}
    model_before = {name: p.detach().clone() for name, p in tiny_model().module.named_parameters()}
    found, parameters, outcome = update(config(), samples(masked=everything))
    assert outcome is None and found["updates/empty"] == 1
    assert all(torch.equal(parameters[name], model_before[name]) for name in parameters)


def test_bfloat16_weights_keep_float32_gradient_sums_over_micro_batches():
    expected, _, _ = update(config(), samples(), dtype=torch.bfloat16)
    found, _, _ = update(
        config(batch={"token_budget": 40, "share_prefixes": False}), samples(), dtype=torch.bfloat16
    )
    # bfloat16 compute differs by its own rounding when shapes change; sums over micro-batches add none of their own
    assert found["loss/total"] == pytest.approx(expected["loss/total"], rel=0.05, abs=0.02)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_scores_do_not_depend_on_layout_or_budget(family):
    found = []
    for change in ({}, {"layout": "padded"}, {"forward_token_budget": 40, "share_prefixes": False}):
        settings = config(batch=change)
        engine = TrainEngine(tiny_model(family), settings, Ledger(), num_updates=1)
        found.append(np.concatenate(engine.score(samples(), "old_logprob")))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-4, atol=1e-5)
