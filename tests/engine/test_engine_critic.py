"""The critic's update does not depend on how its tokens are cut, packed, shared or padded; its optimiser is its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tiny_runs import write_tiny_model

from paceline.algorithms.losses.value import ValueInputs, value_loss
from paceline.config import load_config
from paceline.config.critic import critic_model
from paceline.engine.critic import CriticEngine
from paceline.engine.samples import TrainSample
from paceline.engine.trainer import TrainEngine
from paceline.model.inputs import padded_inputs
from paceline.model.value_head import load_value_model, response_values
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

CPU = torch.device("cpu")
HEADER = tuple(range(5, 25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("critic") / "model")


def config(folder, **sections):
    base = {
        "model": {"path": str(folder)},
        "task": {"path": "prompts.jsonl"},
        "algorithm": {"name": "ppo"},
        "batch": {"num_prompts": 3, "num_samples": 2, "token_budget": 512},
        "rollout": {"max_new_tokens": 8},
        # eps of the gradients' size: Adam's first step is else the sign of the gradient, and signs of zeros are noise
        "critic": {"lr": 1e-2, "eps": 1e-2},
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
            mask[0] *= index  # a token the policy did not choose
            numbers = [generator.normal(0, 1, length).astype(np.float32) for _ in range(4)]
            response = tuple(generator.integers(3, 90, length).tolist())
            found.append(
                TrainSample(
                    f"p{prompt}",
                    prompt_ids,
                    response,
                    mask.astype(np.float32),
                    numbers[0],
                    numbers[1] - 3,
                    values=numbers[2],
                    returns=numbers[3],
                )
            )
    return found


def engine_of(settings):
    """A critic whose head says something, so that gradients reach the decoder."""
    model = load_value_model(critic_model(settings), CPU)
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return CriticEngine(model, settings, Ledger())


def update(settings, batch):
    """Metrics and parameters after one update from the same start."""
    engine = engine_of(settings)
    metrics = MetricAccumulator()
    outcome = engine.update(batch, metrics)
    parameters = {n: p.detach().clone() for n, p in engine.engine.model.module.named_parameters()}
    return metrics.reduce(), parameters, outcome


@pytest.mark.parametrize(
    "change",
    [
        {"critic": {"token_budget": 48}},
        {"batch": {"share_prefixes": False}},
        {"batch": {"share_prefixes": False}, "critic": {"token_budget": 40}},
        {"batch": {"layout": "padded"}},
        {"batch": {"layout": "padded", "pad_to": "mini_batch"}, "critic": {"token_budget": 70}},
        {"train": {"gradient_checkpointing": "all"}},
    ],
    ids=str,
)
def test_an_update_is_the_same_however_its_tokens_are_computed(folder, change):
    expected, expected_parameters, _ = update(config(folder), samples())
    found, parameters, _ = update(config(folder, **change), samples())
    for name in ("critic/loss", "critic/grad_norm", "critic/clip_fraction"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for name, parameter in expected_parameters.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=1e-4, atol=2e-4, msg=name)


def test_the_loss_is_the_mean_over_all_loss_tokens_one_sample_at_a_time(folder):
    settings, batch = config(folder), samples(masked={(2, 0)})
    model = engine_of(settings).engine.model
    total, count = 0.0, 0
    for sample in batch:
        pair = (sample.prompt_ids, sample.response_ids)
        values = response_values(model, padded_inputs([pair], sample.num_tokens, CPU)).detach()
        arrays = [torch.from_numpy(x) for x in (sample.values, sample.returns, sample.loss_mask)]
        inputs = ValueInputs(values, arrays[0], arrays[1], torch.ones_like(values), arrays[2])
        total += float(value_loss(inputs, settings.algorithm.value_clip).loss_T.sum())
        count += sample.num_loss_tokens
    found, _, _ = update(settings, batch)
    assert found["critic/loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"batch": {"layout": "padded"}},
        {"batch": {"share_prefixes": False}},
        {"batch": {"forward_token_budget": 40}},
        {"critic": {"forward_token_budget": 40}},
    ],
    ids=str,
)
def test_values_do_not_depend_on_layout_or_budget(folder, change):
    found = []
    for settings in (config(folder), config(folder, **change)):
        valued = engine_of(settings).with_values(samples())
        found.append(np.concatenate([sample.values for sample in valued]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_each_model_has_the_token_budget_it_was_given(folder):
    settings = config(folder, batch={"share_prefixes": False}, critic={"token_budget": 40})
    metrics = MetricAccumulator()
    engine_of(settings).update(samples(), metrics)
    TrainEngine(tiny_model(), settings, Ledger(), num_updates=1).update(samples(), metrics)
    found = metrics.reduce()
    assert found["critic/micro_batches"] > found["micro_batches"] == 1


def test_repeated_updates_fit_the_returns(folder):
    settings = config(folder, algorithm={"name": "ppo", "value_clip": 0.0}, critic={"lr": 3e-3, "eps": 1e-8})
    engine, losses = engine_of(settings), []
    for _ in range(40):
        metrics = MetricAccumulator()
        engine.update(samples(), metrics)
        losses.append(metrics.reduce()["critic/loss"])
    assert losses[-1] < 0.1 * losses[0]


def test_masked_samples_are_in_neither_numerator_nor_denominator(folder):
    kept = [sample for sample in samples() if sample.prompt_id != "p2"]
    expected, expected_parameters, _ = update(config(folder), kept)
    found, parameters, _ = update(config(folder), samples(masked={(2, 0), (2, 1)}))
    assert found["critic/loss"] == pytest.approx(expected["critic/loss"], rel=1e-6)
    for name, parameter in expected_parameters.items():
        torch.testing.assert_close(parameters[name], parameter)


def test_a_mini_batch_without_a_loss_token_moves_nothing_and_is_counted(folder):
    everything = {(prompt, index) for prompt in range(3) for index in range(2)}
    before = {
        n: p.detach().clone() for n, p in engine_of(config(folder)).engine.model.module.named_parameters()
    }
    found, parameters, outcome = update(config(folder), samples(masked=everything))
    assert outcome is None and found == {"critic/updates/empty": 1}
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)


def test_a_sample_the_critic_has_not_seen_is_an_error_and_not_a_value_of_zero(folder):
    with pytest.raises(ValueError, match="no values or returns"):
        update(config(folder), [replace(sample, returns=None) for sample in samples()])


def test_a_return_that_is_no_number_skips_the_critics_update_and_is_counted(folder):
    batch = samples()
    poisoned = replace(batch[0], returns=np.full_like(batch[0].returns, np.nan))
    before = {
        n: p.detach().clone() for n, p in engine_of(config(folder)).engine.model.module.named_parameters()
    }
    found, parameters, outcome = update(config(folder), [poisoned, *batch[1:]])
    assert outcome is not None and outcome.skipped and found["critic/updates/skipped"] == 1
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)
