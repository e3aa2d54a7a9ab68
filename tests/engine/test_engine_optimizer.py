"""Cases 17, 23 and 33: small updates are kept, bad ones skipped whole, state restored bit by bit."""

import pytest
import torch
from torch import nn

from paceline.config.schema import TrainSection
from paceline.engine.lr_schedule import learning_rate
from paceline.engine.optimizer import MasterAdamW, TooManySkippedUpdatesError


def optimizer(value=1.0, dtype=torch.bfloat16, num_updates=100, **settings):
    weight = nn.Parameter(torch.full((2, 2), value, dtype=dtype))
    return weight, MasterAdamW({"w": weight}, TrainSection(grad_clip=0.0, **settings), num_updates)


def push(weight, gradient=1.0):
    (weight * torch.full_like(weight, gradient)).sum().backward()


@pytest.mark.parametrize(("start", "step", "end"), [(1.0, 6e-4, 0.94), (0.02, 1e-6, 0.0199)])
def test_updates_below_the_spacing_of_bfloat16_are_kept_by_the_masters(start, step, end):
    weight, adam = optimizer(start, lr=step)
    for _ in range(100):
        push(weight)
        adam.step()
    torch.testing.assert_close(adam.masters()["w"], torch.full((2, 2), end), rtol=2e-3, atol=0)
    assert torch.equal(weight.detach(), adam.masters()["w"].bfloat16())


def test_a_non_finite_gradient_leaves_everything_bit_unchanged_and_training_goes_on():
    weight, adam = optimizer(lr=1e-2)
    for index in range(5):
        push(weight, float("nan") if index == 2 else 1.0)
        before = {name: t.clone() for name, t in {**adam.masters(), **adam.moments()}.items()}
        outcome = adam.step()
        assert outcome.skipped == (index == 2)
        if outcome.skipped:
            after = {**adam.masters(), **adam.moments()}
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert adam.state() == {"update_index": 5, "num_applied": 4, "consecutive_skips": 0}


def test_too_many_skips_in_a_row_stop_the_run():
    weight, adam = optimizer(max_skipped_updates=2)
    push(weight, float("inf"))
    adam.step()
    push(weight, float("nan"))
    with pytest.raises(TooManySkippedUpdatesError, match="2 updates in a row"):
        adam.step()


def test_restored_state_is_bit_equal_and_the_schedule_goes_on_where_it_was():
    settings = {"lr": 1e-6, "lr_schedule": "linear", "weight_decay": 0.1}
    weight, adam = optimizer(**settings)
    for index in range(40):
        push(weight, 1.0 + index)
        adam.step()
    fresh_weight, fresh = optimizer(0.0, **settings)
    fresh.load(adam.masters(), adam.moments(), adam.state())
    assert torch.equal(fresh_weight, weight)
    assert learning_rate(TrainSection(**settings), fresh.update_index, 100) == pytest.approx(6e-7)
    for index in range(5):
        for w, a in ((weight, adam), (fresh_weight, fresh)):
            push(w, 0.5 * index)
            a.step()
        for name, tensor in {**adam.masters(), **adam.moments()}.items():
            assert torch.equal({**fresh.masters(), **fresh.moments()}[name], tensor)
