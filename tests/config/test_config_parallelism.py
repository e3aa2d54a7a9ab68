"""Case 25, and the division of ranks over mesh axes: what cannot be is refused with what can."""

import pytest

from paceline.config import Config, ConfigError, load_config
from paceline.config.parallelism import (
    MeshSizes,
    allowed_sequence_parallel_sizes,
    allowed_tensor_parallel_sizes,
    check_heads,
    check_model_heads,
    mesh_sizes,
    role_sizes,
)
from paceline.config.rules import budget_problem
from paceline.config.schema import BatchSection, ClusterSection, ModelSection


@pytest.mark.parametrize(
    ("heads", "kv_heads", "allowed"),
    [(40, 8, (1, 2, 4, 8, 40)), (28, 4, (1, 2, 4, 28)), (12, 2, (1, 2, 4, 6, 12))],
)
def test_sequence_parallel_sizes_divide_heads_and_kv_heads_either_way_round(heads, kv_heads, allowed):
    assert allowed_sequence_parallel_sizes(heads, kv_heads, 40) == allowed
    for size in range(1, 41):
        sizes = MeshSizes(sequence_parallel=size)
        if size in allowed:
            check_heads(sizes, heads, kv_heads)
        else:
            with pytest.raises(ConfigError) as refused:
                check_heads(sizes, heads, kv_heads)
            assert refused.value.nearest == ", ".join(map(str, allowed))


def test_tensor_parallel_sizes_are_further_limited_by_kv_heads():
    assert allowed_tensor_parallel_sizes(28, 28, 28) == (1, 2, 4, 7, 14, 28)
    assert allowed_tensor_parallel_sizes(28, 4, 28) == (1, 2, 4)
    with pytest.raises(ConfigError, match="28 heads and 4 kv heads") as refused:
        check_heads(MeshSizes(tensor_parallel=7), 28, 4)
    assert refused.value.nearest == "1, 2, 4"


def test_sequence_parallelism_divides_the_heads_that_tensor_parallelism_leaves():
    check_heads(MeshSizes(tensor_parallel=2, sequence_parallel=4), 16, 4)
    with pytest.raises(ConfigError, match="the 8 heads that a tensor-parallel rank holds"):
        check_heads(MeshSizes(tensor_parallel=2, sequence_parallel=16), 16, 4)


def test_the_shard_axis_takes_the_ranks_that_are_left():
    cluster = ClusterSection(
        num_devices=32, replicate_size=2, sequence_parallel_size=4, tensor_parallel_size=2
    )
    assert mesh_sizes(cluster) == MeshSizes(2, 2, 4, 2)
    assert mesh_sizes(ClusterSection()) == MeshSizes()
    assert mesh_sizes(cluster, sequence_parallel_size=2).num_data == 8


@pytest.mark.parametrize(
    ("settings", "key", "nearest"),
    [
        ({"tensor_parallel_size": 3}, "cluster.tensor_parallel_size", "2"),
        ({"sequence_parallel_size": 5}, "cluster.sequence_parallel_size", "4"),
        (
            {"tensor_parallel_size": 4, "sequence_parallel_size": 4},
            "cluster.sequence_parallel_size",
            "2",
        ),
        ({"replicate_size": 7}, "cluster.replicate_size", "8"),
        ({"shard_size": 4}, "cluster.shard_size", "8"),
    ],
)
def test_a_size_that_does_not_divide_the_ranks_is_refused_with_the_nearest_that_does(settings, key, nearest):
    with pytest.raises(ConfigError) as refused:
        mesh_sizes(ClusterSection(num_devices=8, **settings))
    assert (refused.value.key, refused.value.nearest) == (key, nearest)


BASE = {"model": {"path": "tiny"}, "task": {"path": "prompts.jsonl"}}


def test_a_role_may_have_a_sequence_parallel_size_of_its_own():
    cluster = {"num_devices": 8, "sequence_parallel_size": 4, "reference_sequence_parallel_size": 2}
    config = Config(cluster=ClusterSection(**cluster))
    assert role_sizes(config) == MeshSizes(shard=2, sequence_parallel=4)
    assert role_sizes(config, "reference") == MeshSizes(shard=4, sequence_parallel=2)
    assert role_sizes(config, "critic") == role_sizes(config)
    wrong = Config(cluster=ClusterSection(num_devices=8, reference_sequence_parallel_size=3))
    with pytest.raises(ConfigError) as refused:
        role_sizes(wrong, "reference")
    assert (refused.value.key, refused.value.nearest) == ("cluster.reference_sequence_parallel_size", "2")


def test_sizes_that_do_not_divide_are_refused_with_the_recipe():
    with pytest.raises(ConfigError) as refused:
        load_config(None, sections={**BASE, "cluster": {"num_devices": 8, "tensor_parallel_size": 3}})
    assert any(
        problem.key == "cluster.tensor_parallel_size" and problem.nearest == "2"
        for problem in refused.value.problems
    )


def test_heads_of_a_local_model_are_checked_before_it_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 28, "num_key_value_heads": 4}')
    model = ModelSection(path=str(tmp_path))
    check_model_heads(Config(model=model))
    wrong = Config(model=model, cluster=ClusterSection(num_devices=7, sequence_parallel_size=7))
    with pytest.raises(ConfigError, match="28 heads") as refused:
        check_model_heads(wrong)
    assert refused.value.nearest == "1, 2, 4, 28"
    reference = Config(
        model=model, cluster=ClusterSection(num_devices=14, reference_sequence_parallel_size=14)
    )
    with pytest.raises(ConfigError) as refused:
        check_model_heads(reference)
    assert refused.value.key == "cluster.reference_sequence_parallel_size"


def test_ranks_that_share_a_sequence_add_their_budgets():
    def config(sharing: int) -> Config:
        return Config(
            batch=BatchSection(token_budget=10, forward_token_budget=10),
            cluster=ClusterSection(num_devices=2, sequence_parallel_size=sharing),
        )

    assert budget_problem(config(2), 20, "why") is None
    problem = budget_problem(config(2), 21, "why")
    assert problem is not None and "2 ranks" in str(problem) and "21 tokens" in str(problem)
    assert problem.nearest is not None and problem.nearest.startswith("11")
    assert budget_problem(config(1), 11, "why") is not None
