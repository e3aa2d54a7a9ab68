"""Adapters and supervised updates give one rank's numbers on any mesh; the reference costs no second model there."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from lora_cases import adapted_updates, supervised_updates
from parallel_cases import Case, comparable
from rank_pool import RankPool

from paceline.config.parallelism import MeshSizes

MESHES = {
    "fsdp 2": (1, 2, 1, 1),
    "replicate 2": (2, 1, 1, 1),
    "ulysses 2": (1, 1, 2, 1),
    "tp 2": (1, 1, 1, 2),
}


@functools.cache
def adapted_reference(family: str) -> dict[str, Any]:
    return adapted_updates(Case(family))


@functools.cache
def supervised_reference(lora: bool) -> dict[str, Any]:
    return supervised_updates(Case("qwen2"), lora)


def assert_metrics_are_the_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for number, (mine, wanted) in enumerate(zip(found["metrics"], expected["metrics"], strict=True)):
        mine, wanted = comparable(mine), comparable(wanted)
        assert set(mine) == set(wanted)
        for name in wanted:
            assert mine[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), (number, name)


def assert_tensors_are_the_same(found: dict[str, Any], expected: dict[str, Any], kind: str) -> None:
    assert set(found[kind]) == set(expected[kind])
    for name, tensor in expected[kind].items():
        torch.testing.assert_close(found[kind][name], tensor, rtol=1e-5, atol=1e-5, msg=f"{kind} {name}")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("mesh", MESHES)
def test_adapters_are_updated_alike_and_the_base_stays_the_reference(mesh: str, family: str, ranks: RankPool):
    expected = adapted_reference(family)
    for found in ranks.run(2, adapted_updates, Case(family, MeshSizes(*MESHES[mesh]))):
        assert_metrics_are_the_same(found, expected)
        for kind in ("parameters", "merged", "adapter"):
            assert_tensors_are_the_same(found, expected, kind)
        for name in ("reference before", "reference after", "policy after"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(found["reference after"], found["reference before"], atol=1e-6)
        assert np.abs(found["policy after"] - found["reference after"]).max() > 0.1


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_adapters_are_cut_with_the_layers_they_adapt_in_every_family(family: str, ranks: RankPool):
    expected = adapted_reference(family)
    found = ranks.run(2, adapted_updates, Case(family, MeshSizes(tensor_parallel=2)))[0]
    for kind in ("parameters", "merged"):
        for name, tensor in expected[kind].items():
            torch.testing.assert_close(found[kind][name], tensor, rtol=2e-5, atol=2e-5, msg=f"{kind} {name}")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("mesh", MESHES)
def test_supervised_updates_are_the_same_on_every_mesh(mesh: str, lora: bool, ranks: RankPool):
    expected = supervised_reference(lora)
    for found in ranks.run(2, supervised_updates, Case("qwen2", MeshSizes(*MESHES[mesh])), lora):
        assert_metrics_are_the_same(found, expected)
        assert_tensors_are_the_same(found, expected, "parameters")
        np.testing.assert_allclose(found["held_out"], expected["held_out"], rtol=1e-5)
