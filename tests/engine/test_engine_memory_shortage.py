"""Memory runs short in an update: the mini-batch is done again in smaller pieces, and gives the same update."""

import pytest
import torch
from test_engine_invariance import INVARIANT, config, samples
from tiny_models import tiny_model
from torch import Tensor, nn

from paceline.config import Config
from paceline.engine.memory_shortage import OutOfMemoryForSampleError
from paceline.engine.recompute import decoder_layers
from paceline.engine.trainer import TrainEngine
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

UNSHARED = {"share_prefixes": False, "token_budget": 128}
LONGEST = max(sample.num_tokens for sample in samples())


def update(settings: Config, memory_for: int | None, in_backward: bool = False):
    """An update of a model whose last layer has memory for so many tokens only."""
    model = tiny_model("llama")
    engine = TrainEngine(model, settings, Ledger(), num_updates=1)
    last = decoder_layers(model.module, model.shape.num_layers)[-1]
    if memory_for is not None and not in_backward:
        last.register_forward_pre_hook(lambda layer, args: _refuse(args[0], memory_for))
    if memory_for is not None and in_backward:
        first = decoder_layers(model.module, model.shape.num_layers)[0]
        first.register_full_backward_hook(lambda layer, into, out: _refuse(out[0], memory_for))
    metrics = MetricAccumulator()
    engine.update(samples(), metrics)
    parameters = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return metrics.reduce(), parameters, engine


def _refuse(hidden: Tensor, memory_for: int) -> None:
    if hidden.shape[1] > memory_for:
        raise torch.OutOfMemoryError(f"no room for {hidden.shape[1]} tokens")


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_an_update_begun_again_in_smaller_pieces_is_the_same_update(in_backward):
    settings = config(batch=UNSHARED)
    expected, expected_parameters, _ = update(settings, None)
    found, parameters, engine = update(settings, 70, in_backward)
    assert found["memory/out_of_memory_retries"] >= 1
    assert found["memory/token_budget"] == engine.engine.budget.tokens <= 96
    assert found["micro_batches"] > expected["micro_batches"]
    assert found["tokens/laid_out"] == expected["tokens/laid_out"]  # what was dropped is not counted
    for name in INVARIANT:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for name, parameter in expected_parameters.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=1e-4, atol=1e-5, msg=name)


def test_it_is_bit_equal_to_an_update_that_began_with_the_smaller_budget():
    _, parameters, engine = update(config(batch=UNSHARED), 70)
    budget = engine.engine.budget.tokens
    _, expected, _ = update(config(batch={**UNSHARED, "token_budget": budget}), None)
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


def test_the_smaller_budget_stays_in_force():
    _, _, engine = update(config(batch=UNSHARED), 70)
    again = MetricAccumulator()
    engine.update(samples(), again)
    assert "memory/out_of_memory_retries" not in again.reduce()


def test_without_shortage_nothing_is_counted():
    found, _, _ = update(config(batch=UNSHARED), None)
    assert "memory/out_of_memory_retries" not in found
    assert found["memory/token_budget"] == 128


def test_one_sample_that_does_not_fit_ends_the_run_and_names_what_needs_less():
    with pytest.raises(
        OutOfMemoryForSampleError, match=r"train\.gradient_checkpointing: selective"
    ) as refused:
        update(config(batch=UNSHARED), LONGEST - 1)
    assert f"one sample of {LONGEST} tokens" in str(refused.value)


def test_other_errors_are_not_taken_for_a_shortage():
    model = tiny_model("llama")
    engine = TrainEngine(model, config(batch=UNSHARED), Ledger(), num_updates=1)

    def fail(layer: nn.Module, args: object) -> None:
        raise RuntimeError("something else")

    decoder_layers(model.module, model.shape.num_layers)[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="something else"):
        engine.update(samples(), MetricAccumulator())
