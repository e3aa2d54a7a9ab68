"""A critic's values, loss, gradient norm and parameters are those of one rank on every mesh."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from critic_cases import critic_updated, critics_updated
from parallel_cases import Case, comparable
from rank_pool import RankPool

from paceline.config.parallelism import MeshSizes

# replicate x shard x sequence parallel x tensor parallel
MESHES = {
    "fsdp 2": (1, 2, 1, 1),
    "replicate 2": (2, 1, 1, 1),
    "tp 2": (1, 1, 1, 2),
    "ulysses 2": (1, 1, 2, 1),
    "fsdp 2 x ulysses 2": (1, 2, 2, 1),
    "fsdp 2 x tp 2": (1, 2, 1, 2),
}
PPO = {"algorithm": {"name": "ppo", "kl_coefficient": 0.0}, "critic": {"lr": 1e-2, "eps": 1e-2}}
VARIATIONS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "packed": ("llama", PPO),
    "small micro-batches": (
        "qwen2",
        {**PPO, "critic": {**PPO["critic"], "token_budget": 40}, "batch": {"share_prefixes": False}},
    ),
    "padded": ("qwen2", {**PPO, "batch": {"layout": "padded"}}),
}


@functools.cache
def reference(family: str) -> dict[str, Any]:
    return critic_updated(Case(family, sections=PPO))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("before", "after"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for mine, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        mine, wanted = comparable(mine), comparable(wanted)
        assert set(mine) == set(wanted)
        for name in wanted:
            assert mine[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
    assert set(found["parameters"]) == set(expected["parameters"])
    for name, parameter in expected["parameters"].items():
        torch.testing.assert_close(found["parameters"][name], parameter, rtol=1e-5, atol=1e-5, msg=name)
    assert found["state"] == expected["state"]


@pytest.mark.parametrize("mesh", MESHES)
def test_two_updates_of_the_critic_are_the_same_on_every_mesh(mesh: str, ranks: RankPool):
    sizes = MeshSizes(*MESHES[mesh])
    cases = [Case(family, sizes, sections) for family, sections in VARIATIONS.values()]
    for found in ranks.run(sizes.num_ranks, critics_updated, cases):
        for case, result in zip(cases, found, strict=True):
            assert_same(result, reference(case.family))


def test_cutting_and_padding_change_nothing_on_one_rank_either():
    for family, sections in VARIATIONS.values():
        assert_same(critic_updated(Case(family, sections=sections)), reference(family))
