"""Replicas over a slow link: exact is bit-equal to all-reduce, compressed loses nothing, local steps meet again."""

import gradient_sync_ranks as on_ranks
import pytest
import torch
from rank_pool import RankPool

from paceline.config.parallelism import MeshSizes
from paceline.engine.gradient_sync.compression import Dense, Int8, TopK
from paceline.engine.gradient_sync.exchange import ring_bytes

COMPRESSORS = [Int8(), TopK(0.05), TopK(0.05, in_int8=True)]


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_the_uncompressed_exchange_is_an_all_reduce(num_replicas: int, ranks: RankPool):
    results = ranks.run(num_replicas, on_ranks.exchanged_and_all_reduced, Dense())
    for found, expected, held_back, num_bytes in results:
        if num_replicas == 2:
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)  # four addends have an order
        assert torch.equal(found, results[0][0])
        assert not held_back.any()
        assert num_bytes == 4000 * (num_replicas - 1)
    assert ring_bytes(1000, 2) == 4000


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_every_replica_gets_the_same_bits(compressor, ranks: RankPool):
    results = ranks.run(4, on_ranks.exchanged_and_all_reduced, compressor)
    for found, _, _, num_bytes in results:
        assert torch.equal(found, results[0][0])
        assert num_bytes == 3 * compressor.num_bytes(1000)


def test_the_int8_sum_is_within_half_a_step_of_every_replica(ranks: RankPool):
    results = ranks.run(4, on_ranks.exchanged_and_all_reduced, Int8())
    bound = sum(on_ranks.gradient(rank, 0).abs().max() / 254 for rank in range(4))
    for found, expected, _, _ in results:
        assert ((found - expected).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_error_feedback_loses_nothing_over_many_updates(compressor, ranks: RankPool):
    for found, expected, shares in ranks.run(2, on_ranks.totals_of_error_feedback, compressor, 6):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
        assert all(0.0 < share < 1.0 for share in shares)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_micro_batches_are_compressed_once_as_their_sum(compressor, ranks: RankPool):
    for accumulated, whole in ranks.run(2, on_ranks.micro_batches_and_one, compressor):
        assert torch.equal(accumulated, whole)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_a_bad_gradient_on_one_replica_is_seen_by_all_and_leaves_what_was_held_back(
    compressor, ranks: RankPool
):
    for not_finite, unchanged, finite, num_bytes in ranks.run(
        2, on_ranks.residual_across_a_skipped_update, compressor
    ):
        assert not_finite and unchanged and finite
        assert num_bytes == compressor.num_bytes(1000)  # sent all the same


def test_local_steps_scale_the_gradient_and_meet_every_kth_update(ranks: RankPool):
    first, second = ranks.run(2, on_ranks.local_steps, 2, 3)
    # each moves by 2 x its own gradient (1 and 2); the mean of -4 and -8 after two; then one more and a last meeting
    assert [value for value, _ in first] == [-2, -6, -8, -9]
    assert [value for value, _ in second] == [-4, -6, -10, -9]
    assert [num_bytes for _, num_bytes in first] == [0, 16, 0, 0]


REPLICAS = MeshSizes(replicate=2)
HSDP = MeshSizes(replicate=2, shard=2)
# every element is sent, so the sum is exact but for int8's rounding and another order of additions
EVERYTHING = {"gradient_sync": "topk", "gradient_sync_fraction": 1.0}


@pytest.mark.parametrize("sizes", [REPLICAS, HSDP], ids=["replicate 2", "hsdp 2 x 2"])
def test_replicas_that_send_everything_are_hsdp(sizes: MeshSizes, ranks: RankPool):
    exact = ranks.run(sizes.num_ranks, on_ranks.trained, {}, sizes, 2)
    found = ranks.run(sizes.num_ranks, on_ranks.trained, EVERYTHING, sizes, 2)
    for mine, expected in zip(found, exact, strict=True):
        assert mine["replicas_equal"] and expected["replicas_equal"]
        assert mine["held_back_norm"] == 0.0
        for name in ("loss/total", "grad_norm", "updates/applied", "micro_batches"):
            for a, b in zip(mine["metrics"], expected["metrics"], strict=True):
                assert a[name] == pytest.approx(b[name], rel=1e-5)
        for name, parameter in expected["parameters"].items():
            torch.testing.assert_close(mine["parameters"][name], parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "train",
    [
        {"gradient_sync": "int8"},
        {"gradient_sync": "topk", "gradient_sync_fraction": 0.1},
        {"gradient_sync": "topk_int8", "gradient_sync_fraction": 0.1},
    ],
    ids=lambda train: str(train["gradient_sync"]),
)
def test_compressed_replicas_stay_bit_equal_send_less_and_hold_the_rest_back(train, ranks: RankPool):
    (exact, _) = ranks.run(2, on_ranks.trained, {}, REPLICAS, 3)
    for found in ranks.run(2, on_ranks.trained, train, REPLICAS, 3):
        assert found["replicas_equal"]
        assert found["held_back_norm"] > 0.0
        for mine, expected in zip(found["metrics"], exact["metrics"], strict=True):
            assert 0 < mine["gradient_sync/bytes"] < 0.3 * expected["gradient_sync/bytes"]
            assert 0.0 < mine["gradient_sync/held_back"] < 1.0
            assert expected["gradient_sync/held_back"] == 0.0
        # the first gradient is the same; int8 moves its norm by less than a hundredth, top-k takes parts away
        first, wanted = found["metrics"][0]["grad_norm"], exact["metrics"][0]["grad_norm"]
        if train["gradient_sync"] == "int8":
            assert first == pytest.approx(wanted, rel=1e-2)
        else:
            assert 0.1 * wanted < first < wanted


def test_replicas_that_update_alone_meet_after_k_updates_and_when_asked(ranks: RankPool):
    train = {"gradient_sync_every": 4}
    (exact, _) = ranks.run(2, on_ranks.trained, {}, REPLICAS, 6)
    for found in ranks.run(2, on_ranks.trained, train, REPLICAS, 6):
        assert found["replicas_equal"]
        sent = [metrics["gradient_sync/bytes"] for metrics in found["metrics"]]
        each = exact["metrics"][0]["gradient_sync/bytes"]
        # masters and two moments after the fourth, and after the last because the caller asks
        assert sent == [0, 0, 0, 3 * each, 0, 3 * each]
        assert all(metrics["updates/applied"] == 1 for metrics in found["metrics"])
