"""Optimiser states on the host: the same bits, nothing on the device in between."""

import pytest
import torch
from test_engine_invariance import config, samples
from tiny_models import tiny_model
from torch import Tensor, nn

from paceline.config.schema import TrainSection
from paceline.engine.host_storage import HostStorage, groups_by_bytes
from paceline.engine.optimizer import MasterAdamW
from paceline.engine.trainer import TrainEngine
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

SIZES = {"a": (40, 8), "b": (8,), "c": (16, 16), "d": (3,)}


def parameters(dtype: torch.dtype, device: str = "cpu") -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(size, generator=generator).to(device, dtype))
        for name, size in SIZES.items()
    }


def optimizer(weights: dict[str, nn.Parameter], offload: bool, preset: str = "plain") -> MasterAdamW:
    settings = TrainSection(
        lr=1e-2, weight_decay=0.1, grad_clip=0.5, optimizer_offload=offload, preset=preset
    )
    return MasterAdamW(weights, settings, 10, group_bytes=1100)


def train(weights: dict[str, nn.Parameter], adam: MasterAdamW, num_steps: int = 3) -> None:
    for step in range(num_steps):
        for index, weight in enumerate(weights.values()):
            if index != 3 or step:  # one parameter gets no gradient at first
                (weight.float().square().sum() * (index + 1 + step)).backward()
        adam.step()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor.cpu(), right[name].cpu()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_masters_and_moments_are_the_same_bits(dtype):
    expected, found = parameters(dtype), parameters(dtype)
    plain, offloaded = optimizer(expected, offload=False), optimizer(found, offload=True)
    train(expected, plain)
    train(found, offloaded)
    assert_same(dict(expected), dict(found))
    assert_same(plain.masters(), offloaded.masters())
    assert_same(plain.moments(), offloaded.moments())
    assert plain.state() == offloaded.state()


def test_between_updates_the_states_take_no_device_memory():
    weights = parameters(torch.bfloat16)
    adam = optimizer(weights, offload=True)
    for num_steps in (0, 2):
        train(weights, adam, num_steps)
        states = adam._states(list(SIZES))
        assert len(states) == (4 if num_steps == 0 else 12)
        assert all(state.untyped_storage().nbytes() == 0 for state in states.values())
    assert all(weight.untyped_storage().nbytes() for weight in weights.values())


def test_masters_that_are_the_weights_stay():
    weights = parameters(torch.float32)
    adam = optimizer(weights, offload=True)
    train(weights, adam, 1)
    assert set(adam._states(list(SIZES))) == {f"{n}.{m}" for n in SIZES for m in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("offload", [False, True])
def test_states_are_restored_from_and_to_either_place(offload):
    source_weights, weights = parameters(torch.bfloat16), parameters(torch.bfloat16)
    source = optimizer(source_weights, offload=not offload)
    train(source_weights, source)
    adam = optimizer(weights, offload=offload)
    train(weights, adam, 1)
    adam.load(source.masters(), source.moments(), source.state())
    assert_same(dict(weights), dict(source_weights))
    assert_same(adam.moments(), source.moments())
    train(weights, adam, 1)
    train(source_weights, source, 1)
    assert_same(adam.masters(), source.masters())


def test_a_skipped_update_moves_nothing():
    weights = parameters(torch.bfloat16)
    adam = optimizer(weights, offload=True)
    train(weights, adam, 1)
    before = {name: tensor.clone() for name, tensor in adam.masters().items()}
    (weights["a"] * float("nan")).sum().backward()
    assert adam.step().skipped
    assert_same(before, adam.masters())


def test_a_whole_update_of_a_model_is_the_same_bits():
    found = []
    for offload in (False, True):
        model = tiny_model("qwen3", torch.bfloat16)
        engine = TrainEngine(model, config(train={"optimizer_offload": offload}), Ledger(), num_updates=2)
        for _ in range(2):
            engine.update(samples(), MetricAccumulator())
        found.append({name: p.detach() for name, p in model.module.named_parameters()})
    assert_same(*found)


def test_groups_keep_the_order_and_the_bound():
    groups = groups_by_bytes({"a": 5, "b": 4, "c": 20, "d": 1, "e": 9}, 10)
    assert groups == [["a", "b"], ["c"], ["d", "e"]]


def test_a_visit_brings_each_group_once_and_keeps_what_the_work_made():
    store, made = HostStorage(torch.device("cpu")), {"x": torch.ones(3), "y": torch.ones(3)}
    store.put_away(made)

    def work(names):
        for name in names:
            made[name] += 1
            made[f"{name}.new"] = torch.full((2,), 7.0)

    store.visit([["x"], ["y"]], lambda names: {k: v for k, v in made.items() if k[0] in names}, work)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in made.values())
    assert store.value("x").tolist() == [2.0] * 3 and store.value("y.new").tolist() == [7.0] * 2
    assert store.num_bytes == 2 * 12 + 2 * 8


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["plain", "fast"])
def test_on_a_device_the_bits_are_the_same_and_memory_is_given_back(preset):
    expected, found = parameters(torch.bfloat16, "cuda"), parameters(torch.bfloat16, "cuda")
    plain = optimizer(expected, offload=False, preset=preset)
    offloaded = optimizer(found, offload=True, preset=preset)
    train(expected, plain)
    train(found, offloaded)
    assert_same(dict(expected), dict(found))
    assert_same(plain.moments(), offloaded.moments())
    assert all(s.untyped_storage().nbytes() == 0 for s in offloaded._states(list(SIZES)).values())
