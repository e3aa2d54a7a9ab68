"""Cases 1, 2, 5, 8, 14, 24, 33 across ranks: little, nothing or something broken to do, and state on other ranks."""

import numpy as np
import pytest
import torch
from parallel_cases import samples
from rank_faults import (
    continued,
    counted_work,
    nothing_to_train,
    one_bad_sample,
    one_rank_dies,
    sample,
    scored_by_reference,
    synced,
    trained_state,
    unit_loss,
    valued_loss,
    whitened,
)
from rank_pool import RankPool

from paceline.batching.cost import CostModel
from paceline.batching.micro_batches import OverBudgetError
from paceline.config.parallelism import MeshSizes
from paceline.engine.distribution import distribute

FSDP2 = MeshSizes(shard=2)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(
    ("lengths", "budget", "passes", "no_ops"),
    [([9, 8, 3], 10, 3, 1), ([9, 8], 10, 2, 0), ([9], 10, 1, 1), ([7, 7, 7, 2, 2, 2], 8, 4, 0)],
    ids=str,
)
def test_ranks_with_unequal_work_make_equal_calls_and_give_one_rank_s_gradient(
    lengths, budget, passes, no_ops, layout, ranks: RankPool
):
    expected = unit_loss(MeshSizes(), lengths, 64, layout)
    for found in ranks.run(2, unit_loss, FSDP2, lengths, budget, layout):
        assert found["loss/total"] == pytest.approx(1.0, rel=1e-6)
        # filler is in no maximum: the longest real sample is
        assert found["ratio/max"] == max(lengths) - 1
        assert (found["micro_batches"], found["micro_batches/no_op"]) == (passes, no_ops)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        for name, parameter in expected["parameters"].items():
            torch.testing.assert_close(found["parameters"][name], parameter, rtol=1e-5, atol=1e-6)


def test_four_ranks_and_one_sample(ranks: RankPool):
    expected = unit_loss(MeshSizes(), [9], 64, "packed")
    (found, *_) = ranks.run(4, unit_loss, MeshSizes(replicate=2, shard=2), [9], 16, "packed")
    assert found["micro_batches"] == 1 and found["micro_batches/no_op"] == 3
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    "sizes", [FSDP2, MeshSizes(tensor_parallel=2), MeshSizes(sequence_parallel=2)], ids=str
)
def test_every_rank_empty_moves_nothing_and_is_counted_once(sizes, ranks: RankPool):
    for outcome, metrics, same in ranks.run(2, nothing_to_train, sizes):
        assert outcome is None and same
        assert metrics == {"updates/empty": 1.0}


@pytest.mark.parametrize("sizes", [MeshSizes(), FSDP2, MeshSizes(sequence_parallel=2)], ids=str)
def test_the_token_mean_is_over_the_tokens_of_all_ranks(sizes, ranks: RankPool):
    batch = [sample(2, 4.0), sample(4, 0.0)]
    found = (
        [valued_loss(sizes, batch, 16)]
        if sizes.num_ranks == 1
        else ranks.run(sizes.num_ranks, valued_loss, sizes, batch, 16)
    )
    assert all(result["loss/total"] == pytest.approx(1.0, rel=1e-6) for result in found)


@pytest.mark.parametrize(
    "sizes",
    [MeshSizes(sequence_parallel=2), MeshSizes(sequence_parallel=4), MeshSizes(shard=2, sequence_parallel=2)],
    ids=str,
)
def test_a_sequence_on_several_ranks_counts_once(sizes, ranks: RankPool):
    expected = unit_loss(MeshSizes(), [9], 16, "packed")
    for found in ranks.run(sizes.num_ranks, unit_loss, sizes, [9], 16, "packed"):
        assert found["loss/total"] == pytest.approx(1.0, rel=1e-6)
        for name in ("grad_norm", "ratio/max", "micro_batches", "updates/applied"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
        assert found["tokens/laid_out"] == 12 if sizes.sequence_parallel == 4 else 10


def test_a_row_may_hold_the_budget_of_all_ranks_that_share_it(ranks: RankPool):
    sequence = MeshSizes(sequence_parallel=2)
    (found, _) = ranks.run(2, unit_loss, sequence, [20], 10, "packed")
    assert found["micro_batches"] == 1
    (mixed, _) = ranks.run(2, unit_loss, sequence, [20, 3, 3], 10, "packed")
    assert mixed["tokens/laid_out"] == 26
    outcomes = ranks.outcomes(2, unit_loss, sequence, [21], 10, "packed")
    for failure, _ in outcomes:  # on both ranks alike, so neither waits for the other
        assert OverBudgetError.__name__ in failure
        assert "21 tokens exceeds the token budget of 20" in failure and "sequence parallel 2" in failure


@pytest.mark.parametrize("sizes", [FSDP2, MeshSizes(tensor_parallel=2)], ids=str)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(sizes, ranks: RankPool):
    for found in ranks.run(2, one_bad_sample, sizes):
        skipped = [skip for skip, _, _ in found["history"]]
        assert skipped == [False, True, False, True]
        assert [unchanged for _, _, unchanged in found["history"]] == skipped
        assert all(np.isnan(norm) == skip for skip, norm, _ in found["history"])
        assert found["skipped"] == [0.0, 1.0, 0.0, 1.0]
        assert "2 updates in a row" in found["stopped"]


def test_whitening_takes_one_affine_map_for_all_shards_and_an_empty_one_joins(ranks: RankPool):
    right = [-1.41421356, -0.70710678, 0.0, 0.70710678, 1.41421356]
    first, second = ranks.run(2, whitened, [[1.0, 2.0], [3.0, 4.0, 5.0]])
    np.testing.assert_allclose([*first.values[0], *second.values[0]], right, rtol=1e-6, atol=1e-12)
    first, second, *empty = ranks.run(4, whitened, [[1.0, 2.0], [3.0, 4.0, 5.0], [], []])
    np.testing.assert_allclose([*first.values[0], *second.values[0]], right, rtol=1e-6, atol=1e-12)
    assert [shard.values for shard in empty] == [(), ()]
    assert all(shard.values == () for shard in ranks.run(2, whitened, [[], []]))


def test_samples_that_do_not_divide_are_spread_by_cost_over_data_ranks_only():
    lengths = [10, 9, 8, 7, 6, 5, 4]
    shares = distribute([sample(n) for n in lengths], 3, CostModel(), share_prefixes=False)
    assert sorted(index for share in shares for index in share) == list(range(7))
    assert sorted(map(len, shares)) == [2, 2, 3]
    assert max(sum(lengths[index] for index in share) for share in shares) <= 18
    assert MeshSizes(shard=3, sequence_parallel=2).num_data == 3


def test_groups_stay_together_unless_that_makes_a_rank_heavier():
    batch = samples(num_prompts=4, num_samples=4)
    shares = distribute(batch, 2, CostModel(), share_prefixes=True)
    assert [len({batch[index].prompt_id for index in share}) for share in shares] == [2, 2]
    single = samples(num_prompts=1, num_samples=4)
    assert sorted(map(len, distribute(single, 2, CostModel(), share_prefixes=True))) == [2, 2]
    assert distribute(single[:1], 2, CostModel(), share_prefixes=True) in (((0,), ()), ((), (0,)))
    assert distribute([], 3, CostModel(), share_prefixes=True) == ((), (), ())


def test_state_of_four_ranks_goes_on_with_other_ranks_bit_by_bit(ranks: RankPool):
    (saved, *_) = ranks.run(4, trained_state, MeshSizes(replicate=2, shard=2))
    unbroken = continued(MeshSizes(), saved)
    for sizes in (
        MeshSizes(shard=4),
        MeshSizes(shard=2, tensor_parallel=2),
        MeshSizes(shard=2),
    ):
        for found in ranks.run(sizes.num_ranks, continued, sizes, saved):
            for name, tensor in {**saved["masters"], **saved["moments"]}.items():
                assert torch.equal(found["loaded"][name], tensor), name
            np.testing.assert_allclose(found["scores"], unbroken["scores"], rtol=1e-5, atol=1e-5)
            for name, tensor in unbroken["after"].items():
                torch.testing.assert_close(found["after"][name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "sizes",
    [
        MeshSizes(sequence_parallel=2),
        MeshSizes(tensor_parallel=2),
        MeshSizes(sequence_parallel=2, tensor_parallel=2),
    ],
    ids=str,
)
def test_ranks_that_share_samples_count_tokens_and_flops_once(sizes, ranks: RankPool):
    alone = counted_work(MeshSizes())
    found = ranks.run(sizes.num_ranks, counted_work, sizes)
    assert sum(part["tokens"] for part in found) == found[0]["laid_out"]
    assert sum(part["flops"] for part in found) == pytest.approx(alone["flops"], rel=1e-9)
    assert sum(part["scored_flops"] for part in found) == pytest.approx(alone["scored_flops"], rel=1e-9)
    assert all(part["flops"] == found[0]["flops"] for part in found)


@pytest.mark.parametrize(
    "reference",
    [MeshSizes(sequence_parallel=2), MeshSizes(tensor_parallel=2), MeshSizes(replicate=2)],
    ids=str,
)
def test_a_role_on_a_mesh_of_its_own_gives_the_same_values(reference: MeshSizes, ranks: RankPool):
    expected, _ = scored_by_reference(MeshSizes(), MeshSizes())
    for before, after in ranks.run(2, scored_by_reference, FSDP2, reference):
        np.testing.assert_allclose(np.concatenate(before), np.concatenate(expected), rtol=1e-5, atol=1e-5)
        assert all(np.array_equal(mine, first) for mine, first in zip(after, before, strict=True))


@pytest.mark.parametrize("sizes", [MeshSizes(replicate=2), MeshSizes(replicate=2, shard=2)], ids=str)
def test_copies_that_meet_in_a_hook_give_what_hsdp_gives(sizes, ranks: RankPool):
    expected = synced(MeshSizes(), False)
    for by_hook in (True, False):
        for found in ranks.run(sizes.num_ranks, synced, sizes, by_hook):
            for name, parameter in expected.items():
                torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-6, msg=name)


def test_a_rank_does_not_wait_for_one_that_died():
    pool = RankPool()
    try:
        (failure, seen), (ended, _) = pool.outcomes(2, one_rank_dies, FSDP2)
    finally:
        pool.close()
    assert failure is None and ended == "the process ended"
    assert "closed" in seen.lower() or "reset" in seen.lower(), seen
