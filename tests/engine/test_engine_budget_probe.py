"""The largest budget from two measured micro-batches, and rehearsals that leave nothing behind."""

import pytest
import torch
from tiny_models import tiny_model

from paceline.config import load_config
from paceline.engine.budget_probe import MeasuredCost, measure_cost
from paceline.engine.mesh import RankMesh
from paceline.engine.samples import num_tokens
from paceline.engine.trainer import TrainEngine, made_up_samples
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator


class LinearDevice:
    """A device whose micro-batches take 700 bytes and 9 per token, over 50 held and 40 of gradients."""

    def __init__(self) -> None:
        self._held, self._peak = 50, 0
        self.sizes: list[int] = []

    def held(self) -> int:
        return self._held

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._peak = self._held

    def run(self, num_tokens: int) -> None:
        self.sizes.append(num_tokens)
        self._held = 90
        self._peak = max(self._peak, self._held + 700 + 9 * num_tokens)


def test_two_micro_batches_give_what_is_fixed_and_what_a_token_takes():
    device = LinearDevice()
    cost = measure_cost(device.run, 1000, device)
    assert cost == MeasuredCost(held=90, fixed=700.0, per_token=9.0)
    assert device.sizes[:2] == [500, 500]  # the first two, whose gradients are new, are not measured


def test_the_largest_budget_is_the_last_step_whose_peak_fits():
    cost = MeasuredCost(held=90, fixed=700.0, per_token=9.0)
    assert cost.largest(90 + 700 + 9 * 1024, most=10_000) == 1024
    assert cost.largest(90 + 700 + 9 * 1024 - 1, most=10_000) == 768
    assert cost.largest(1e9, most=1000) == 1000
    assert cost.largest(100, most=1000) == 0


@pytest.mark.parametrize("size", [1, 2, 17, 64, 200])
def test_made_up_samples_fill_one_micro_batch_of_every_rank(size):
    found = made_up_samples(size, 40, RankMesh.single(), vocab_size=97)
    total = sum(num_tokens(sample) for sample in found)
    assert total <= size and total >= size - 1
    assert all(sample.has_advantage and sample.num_loss_tokens for sample in found)
    assert len({sample.prompt_ids for sample in found}) == len(found)


def test_a_rehearsal_leaves_weights_metrics_and_schedule_untouched():
    sections = {"model": {"path": "tiny"}, "task": {"path": "p"}, "batch": {"token_budget": 128}}
    settings = load_config(None, sections={**sections, "rollout": {"max_new_tokens": 20}})
    model = tiny_model("llama")
    engine = TrainEngine(model, settings, Ledger(), num_updates=1)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    assert engine.rehearse(128, longest=30)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.module.parameters())
    engine.optimizer.zero_grad()
    assert all(p.grad is None for p in model.module.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.module.named_parameters())
    assert engine.optimizer.state()["update_index"] == 0


def test_moments_that_are_still_to_come_are_reserved():
    sections = {"model": {"path": "tiny"}, "task": {"path": "p"}, "rollout": {"max_new_tokens": 20}}
    model = tiny_model("llama")
    engine = TrainEngine(model, load_config(None, sections=sections), Ledger(), num_updates=1)
    num_parameters = sum(p.numel() for p in model.module.parameters())
    assert engine.optimizer.bytes_to_come() == 8 * num_parameters
    engine.update(made_up_samples(64, 30, RankMesh.single(), 97), MetricAccumulator())
    assert engine.optimizer.bytes_to_come() == 0
