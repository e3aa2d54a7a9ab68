"""Weights that are only read wait on the host, on one rank and on several, and give the same scores."""

import numpy as np
import pytest
import torch
from offload_cases import parked_reference, trained_states
from rank_pool import RankPool
from torch import nn

from paceline.config.parallelism import MeshSizes
from paceline.engine.parked_weights import ParkedWeights

FSDP2 = MeshSizes(shard=2)


def test_a_reference_on_the_host_scores_the_same_and_leaves_the_device():
    expected, _, held = parked_reference(MeshSizes(), offload=False)
    first, second, left = parked_reference(MeshSizes(), offload=True)
    assert np.array_equal(first, expected) and np.array_equal(second, expected)
    assert held > 0 and left == 0


def test_shards_of_a_reference_and_moments_of_shards_wait_on_the_host_too(ranks: RankPool):
    expected, _, _ = parked_reference(MeshSizes(), offload=False)
    for first, second, left in ranks.run(2, parked_reference, FSDP2, True):
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-5)
        assert np.array_equal(first, second) and left == 0
    on_device, offloaded = (ranks.run(2, trained_states, FSDP2, offload) for offload in (False, True))
    for states, found in zip(on_device, offloaded, strict=True):
        assert all(torch.equal(found[name], state) for name, state in states.items())


def test_parameters_that_share_a_storage_come_back_whole():
    joint = torch.arange(12.0)
    module = nn.Module()
    module.left = nn.Parameter(joint[:4], requires_grad=False)
    module.right = nn.Parameter(joint[4:].view(2, 4), requires_grad=False)
    parked = ParkedWeights(module)
    assert joint.untyped_storage().nbytes() == 0
    for _ in range(2):
        with parked.here():
            assert joint.tolist() == list(range(12))
            assert module.right[1, 3] == 11.0
    assert joint.untyped_storage().nbytes() == 0


def test_weights_that_are_a_mapped_file_are_parked_too(tmp_path):
    path = tmp_path / "weights"
    torch.arange(4.0).numpy().tofile(path)
    module = nn.Module()
    module.mapped = nn.Parameter(torch.from_file(str(path), shared=False, size=4), requires_grad=False)
    parked = ParkedWeights(module)
    assert module.mapped.untyped_storage().nbytes() == 0
    with parked.here():
        assert module.mapped.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_trained_weights_are_not_parked():
    with pytest.raises(ValueError, match="the optimiser holds them"):
        ParkedWeights(nn.Linear(2, 2))
