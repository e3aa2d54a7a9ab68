"""The invariance table: loss, gradient norm, every metric and the parameters after two updates are those of one rank,
whatever the mesh, layout, budget, chunk and recomputation. Cases 8 and 24."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from parallel_cases import Case, comparable, updated, updated_all
from rank_pool import RankPool

from paceline.config.parallelism import MeshSizes

# replicate x shard x sequence parallel x tensor parallel
MESHES = {
    "one rank": (1, 1, 1, 1),
    "fsdp 2": (1, 2, 1, 1),
    "fsdp 4": (1, 4, 1, 1),
    "replicate 2": (2, 1, 1, 1),
    "hsdp 2 x 2": (2, 2, 1, 1),
    "tp 2": (1, 1, 1, 2),
    "ulysses 2": (1, 1, 2, 1),
    "ulysses 4": (1, 1, 4, 1),
    "fsdp 2 x tp 2": (1, 2, 1, 2),
    "fsdp 2 x ulysses 2": (1, 2, 2, 1),
    "ulysses 2 x tp 2": (1, 1, 2, 2),
}

# llama ties its embeddings; qwen2 does not, and has biases; both have two kv heads for four query heads
VARIATIONS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "packed": ("llama", {}),
    "small micro-batches and chunks": (
        "qwen2",
        {"batch": {"token_budget": 40, "share_prefixes": False}, "train": {"logprob_chunk": 3}},
    ),
    "padded, recomputed": (
        "qwen2",
        {"batch": {"layout": "padded"}, "train": {"gradient_checkpointing": "all"}},
    ),
    "kept after forward, no prefetch": (
        "llama",
        {"train": {"reshard_after_forward": False, "forward_prefetch": 0, "gradient_checkpointing": "all"}},
    ),
}


@functools.cache
def reference(family: str, dtype: torch.dtype = torch.float32, with_adapters: bool = False) -> dict[str, Any]:
    return updated(Case(family, dtype=dtype, with_adapters=with_adapters))


def assert_same(found: dict[str, Any], expected: dict[str, Any], rel: float, atol: float) -> None:
    for name in ("before", "after", "gathered_scores"):
        wanted = expected["before" if name == "before" else "after"]
        np.testing.assert_allclose(found[name], wanted, rtol=rel, atol=atol, err_msg=name)
    for number, (mine, wanted) in enumerate(zip(found["metrics"], expected["metrics"], strict=True)):
        mine, wanted = comparable(mine), comparable(wanted)
        assert set(mine) == set(wanted)
        for name in wanted:
            assert mine[name] == pytest.approx(wanted[name], rel=rel, abs=atol), (number, name)
    assert set(found["parameters"]) == set(expected["parameters"])
    for kind in ("parameters", "gathered"):
        for name, parameter in expected["parameters"].items():
            torch.testing.assert_close(
                found[kind][name], parameter, rtol=rel, atol=atol, msg=f"{kind} {name}"
            )
    assert found["state"] == expected["state"]


@pytest.mark.parametrize("mesh", MESHES)
def test_two_updates_are_the_same_on_every_mesh(mesh: str, ranks: RankPool):
    sizes = MeshSizes(*MESHES[mesh])
    cases = [
        Case(family, sizes, sections)
        for name, (family, sections) in VARIATIONS.items()
        # DTensor's dispatch is slow on a CPU, and keeping weights is FSDP's business alone
        if sizes.tensor_parallel == 1 or not name.startswith("kept")
    ]
    by_rank = [updated_all(cases)] if sizes.num_ranks == 1 else ranks.run(sizes.num_ranks, updated_all, cases)
    for found in by_rank:
        for case, result in zip(cases, found, strict=True):
            assert_same(result, reference(case.family), rel=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(1, 2, 2, 2), (2, 2, 2, 1)], ids=["fsdp x ulysses x tp", "hsdp x ulysses"])
def test_eight_ranks_along_three_axes(axes: tuple[int, int, int, int], ranks: RankPool):
    found = ranks.run(8, updated, Case("llama", MeshSizes(*axes)))
    for result in found:
        assert_same(result, reference("llama"), rel=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2", "ulysses 2"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "mistral"])
def test_windows_soft_caps_and_norms_of_heads_divide_over_ranks_too(mesh: str, family: str, ranks: RankPool):
    (found, _) = ranks.run(2, updated, Case(family, MeshSizes(*MESHES[mesh]), num_updates=2))
    assert_same(found, reference(family), rel=2e-5, atol=2e-5)


@pytest.mark.parametrize("mesh", ["fsdp 2", "ulysses 2", "hsdp 2 x 2"])
def test_adapters_alone_are_trained_and_left_out_for_the_reference_on_every_mesh(mesh: str, ranks: RankPool):
    sizes = MeshSizes(*MESHES[mesh])
    expected = reference("llama", with_adapters=True)
    found = ranks.run(sizes.num_ranks, updated, Case("llama", sizes, with_adapters=True))[0]
    assert all(".lora_" in name for name in found["parameters"])
    assert_same(found, expected, rel=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["reference"], found["before"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2", "ulysses 2 x tp 2"])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_activations_of_shards_and_of_divided_products_wait_on_the_host_too(
    mesh: str, recompute: str, ranks: RankPool
):
    sizes = MeshSizes(*MESHES[mesh])
    train = {
        "activation_offload": True,
        "activation_offload_min_kb": 0,
        "gradient_checkpointing": recompute,
    }
    for found in ranks.run(sizes.num_ranks, updated, Case("llama", sizes, {"train": train})):
        for metrics in found["metrics"]:
            assert metrics.pop("memory/activation_bytes_offloaded") > 0
        assert_same(found, reference("llama"), rel=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", ["fsdp 2", "ulysses 2", "hsdp 2 x 2"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_layers_on_shards_give_the_numbers_of_plain_ones_on_one_rank(
    mesh: str, family: str, ranks: RankPool
):
    sizes = MeshSizes(*MESHES[mesh])
    found = ranks.run(sizes.num_ranks, updated, Case(family, sizes, is_fused=True))[0]
    assert_same(found, reference(family), rel=2e-5, atol=2e-5)


def test_frozen_weights_stay_in_the_working_dtype_beside_float32_masters(ranks: RankPool):
    """One FSDP part then holds shards of both dtypes."""
    expected = reference("llama", torch.bfloat16, with_adapters=True)
    case = Case("llama", MeshSizes(shard=2), dtype=torch.bfloat16, with_adapters=True)
    (found, _) = ranks.run(2, updated, case)
    for mine, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine["loss/total"] == pytest.approx(wanted["loss/total"], rel=3e-3)
    for name, parameter in expected["parameters"].items():
        assert found["parameters"][name].dtype == torch.float32
        assert (found["parameters"][name] - parameter).abs().mean() < 1e-3, name


@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2", "ulysses 2"])
def test_bfloat16_differs_by_its_own_rounding_only(mesh: str, ranks: RankPool):
    """Measured on these models: loss within 1e-3, gradient norm within 2e-2, parameters within 1e-3 (sharded and
    sequence parallel) and 6e-3 (tensor parallel, whose products are summed in another order) of one rank's."""
    expected = reference("llama", torch.bfloat16)
    (found, _) = ranks.run(2, updated, Case("llama", MeshSizes(*MESHES[mesh]), dtype=torch.bfloat16))
    for mine, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        for name, rel in {"loss/total": 3e-3, "entropy": 3e-3, "grad_norm": 3e-2}.items():
            assert mine[name] == pytest.approx(wanted[name], rel=rel), name
    for name, parameter in expected["parameters"].items():
        difference = (found["parameters"][name] - parameter).abs()
        assert difference.max() < 1e-2 and difference.mean() < 1e-3, name
