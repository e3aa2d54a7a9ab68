"""Case 7 and the shapes of micro-batches: whatever rows are padded to, numbers are the same and shapes are counted."""

from typing import Any

import numpy as np
import pytest
import torch
from parallel_cases import Case, samples, settings, updated
from rank_pool import RankPool
from test_invariance_table import assert_same, reference
from tiny_models import tiny_model

from paceline.batching.micro_batches import OverBudgetError
from paceline.config.parallelism import MeshSizes
from paceline.engine.planning import build_micro_batch, cost_model, plan_batch
from paceline.engine.samples import TrainSample, num_tokens
from paceline.engine.trainer import TrainEngine
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

CPU = torch.device("cpu")
CHOICES: dict[str, dict[str, Any]] = {
    "own maximum": {"layout": "padded", "token_budget": 70},
    "buckets": {"layout": "padded", "pad_to": "bucket", "token_budget": 70},
    "coarse buckets, equal rows": {
        **{"layout": "padded", "pad_to": "bucket", "buckets_per_doubling": 1},
        "pad_rows": 3,
    },
    "mini-batch maximum": {"layout": "padded", "pad_to": "mini_batch", "token_budget": 70},
    "mini-batch maximum, equal rows": {
        **{"layout": "padded", "pad_to": "mini_batch"},
        **{"token_budget": 70, "pad_rows": 2},
    },
    "forced length": {"layout": "padded", "pad_length": 41},
    "packed to a multiple": {"pack_multiple": 64},
    "packed to a multiple, not shared": {"pack_multiple": 48, "share_prefixes": False, "token_budget": 70},
    "packed to the budget": {"pack_multiple": 512},
}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("choice", CHOICES)
def test_two_updates_are_the_same_whatever_rows_are_padded_to(choice: str, family: str):
    found = updated(Case(family, sections={"batch": CHOICES[choice]}))
    assert_same(found, reference(family), rel=1e-5, atol=1e-5)
    laid_out = [metrics["tokens/laid_out"] for metrics in found["metrics"]]
    for metrics, slots in zip(found["metrics"], laid_out, strict=True):
        own = metrics["tokens/effective_share"] * slots
        if CHOICES[choice].get("layout") == "padded":
            assert metrics["tokens/padding"] == pytest.approx(slots - own)
        assert 0 <= metrics["tokens/padding"] < slots


@pytest.mark.parametrize(
    ("choice", "sizes"),
    [
        ("mini-batch maximum, equal rows", MeshSizes(shard=2)),
        ("buckets", MeshSizes(sequence_parallel=2)),
        ("packed to a multiple, not shared", MeshSizes(sequence_parallel=2)),
        ("packed to a multiple", MeshSizes(shard=2)),
    ],
)
def test_padding_choices_hold_across_ranks(choice: str, sizes: MeshSizes, ranks: RankPool):
    for found in ranks.run(2, updated, Case("llama", sizes, {"batch": CHOICES[choice]})):
        assert_same(found, reference("llama"), rel=1e-5, atol=1e-5)


def shapes_of(batch: list[TrainSample], longest: int | None = None, **choice: Any) -> set[tuple[int, int]]:
    config = settings({"batch": choice})
    plan = plan_batch(
        batch, config.batch, config.batch.token_budget, cost_model(tiny_model().shape), 1, longest
    )
    shapes = set()
    for row in plan.rows:
        micro_batch = build_micro_batch(batch, row, config.batch, CPU)
        assert micro_batch.inputs.input_ids_BT.shape == (row.num_rows, row.width)
        assert micro_batch.num_slots == row.num_rows * row.width <= config.batch.token_budget
        covered = sum(length for length, _ in micro_batch.segments)
        assert covered + micro_batch.num_padding == micro_batch.num_slots
        shapes.add((row.num_rows, row.width))
    return shapes


def varied(seed: int, num: int = 24) -> list[TrainSample]:
    """Samples of many lengths, each with a prompt of its own."""
    generator = np.random.default_rng(seed)
    found = []
    for index in range(num):
        length = int(generator.integers(5, 40))
        ones = np.ones(length, dtype=np.float32)
        prompt = tuple(generator.integers(3, 90, 4).tolist())
        response = tuple(generator.integers(3, 90, length).tolist())
        found.append(TrainSample(f"p{index}", prompt, response, ones, ones, -2 * ones, -2 * ones, -2 * ones))
    return found


def test_buckets_and_multiples_make_few_shapes_of_many_lengths():
    batches = [varied(seed) for seed in range(4)]
    longest = max(num_tokens(sample) for batch in batches for sample in batch)

    def number(**choice: Any) -> int:
        return len(set().union(*(shapes_of(batch, longest, token_budget=128, **choice) for batch in batches)))

    own = number(layout="padded")
    assert own > 12
    assert number(layout="padded", pad_to="bucket", pad_rows=4) <= 9 < own
    assert number(layout="padded", pad_to="mini_batch", pad_rows=2) == 1
    assert number(layout="padded", pad_length=64, pad_rows=2) == 1
    packed = number(share_prefixes=False)
    assert packed > 8
    assert number(share_prefixes=False, pack_multiple=32) <= 4


def test_shapes_are_counted_when_they_are_new_and_over_the_process():
    config = settings({"batch": {"layout": "padded", "pad_to": "bucket", "token_budget": 128}})
    engine = TrainEngine(tiny_model(), config, Ledger(), 3)
    seen = []
    for seed in (0, 0, 1):
        metrics = MetricAccumulator()
        engine.update(varied(seed), metrics)
        values = metrics.reduce()
        seen.append((values["batch/new_shapes"], values["batch/distinct_shapes"]))
    assert seen[0][0] == seen[0][1] > 1
    assert seen[1] == (0, seen[0][1])
    assert seen[2][1] == seen[0][1] + seen[2][0]
    engine.score(varied(0), "old_logprob")
    metrics = MetricAccumulator()
    engine.update(varied(0), metrics)
    # forward-only shapes are others: they have their own budget, and kernels plan for them apart
    assert metrics.reduce()["batch/distinct_shapes"] > seen[2][1]


def one_sample(length: int, padding_like: int = 2) -> TrainSample:
    """A sample that ends in the end token 2, which is also what some tokenizers pad with."""
    ids = (*range(10, 10 + length - 2), padding_like)
    ones = np.ones(length - 1, dtype=np.float32)
    return TrainSample("p", (9,), ids, ones, ones, -2 * ones, -2 * ones, -2 * ones)


def test_case_7_padding_to_5_or_to_8_changes_neither_loss_nor_gradient():
    found = []
    for width in (5, 8):
        batch_settings = {"layout": "padded", "pad_length": width}
        config = settings({"batch": batch_settings, "rollout": {"max_new_tokens": 4}})
        engine = TrainEngine(tiny_model(), config, Ledger(), 1)
        metrics = MetricAccumulator()
        batch = [one_sample(3), one_sample(2)]
        scores = np.concatenate(engine.score(batch, "old_logprob"))
        engine.update(batch, metrics)
        found.append((metrics.reduce(), scores, engine.optimizer.masters()))
    (narrow, narrow_scores, narrow_parameters), (wide, wide_scores, wide_parameters) = found
    assert len(narrow_scores) == 3  # one target for each response token, none for padding
    np.testing.assert_allclose(wide_scores, narrow_scores, rtol=1e-5, atol=1e-6)
    for name in ("loss/total", "grad_norm", "entropy"):
        assert wide[name] == pytest.approx(narrow[name], rel=1e-5)
    for name, parameter in narrow_parameters.items():
        torch.testing.assert_close(wide_parameters[name], parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padded", [{"layout": "padded", "pad_length": 30}, {"pack_multiple": 64}])
def test_what_stands_in_the_padding_is_never_read(padded: dict[str, Any]):
    """Scores are the same when every padding position holds another token."""
    config = settings({"batch": padded})
    batch = varied(0, 4)[:2]
    batch = [sample for sample in batch if num_tokens(sample) <= 30] or [one_sample(12)]
    model = tiny_model()
    plan = plan_batch(batch, config.batch, config.batch.token_budget, cost_model(model.shape))
    scores = []
    for filler in (0, 77):
        micro_batch = build_micro_batch(batch, plan.rows[0], config.batch, CPU)
        assert micro_batch.num_padding > 0
        ids = micro_batch.inputs.input_ids_BT
        ids[ids == 0] = filler  # no sample holds a 0
        hidden = model.hidden(ids, micro_batch.inputs.position_ids_BT, micro_batch.inputs.plan)
        scores.append(hidden[micro_batch.inputs.source_R])
    torch.testing.assert_close(scores[1], scores[0])


def test_a_sample_over_the_forced_length_is_refused_before_anything_is_computed():
    config = settings({"batch": {"layout": "padded", "pad_length": 20}})
    engine = TrainEngine(tiny_model(), config, Ledger(), 1)
    with pytest.raises(ValueError, match=r"forced width 20 is less than the longest sample, \d+ tokens"):
        engine.update(samples(), MetricAccumulator())


def test_case_4_a_sample_over_the_budget_of_its_sequence_parallel_group_is_named_with_every_number():
    config = settings({"batch": {"token_budget": 10, "layout": "padded"}})
    engine = TrainEngine(tiny_model(), config, Ledger(), 1)
    with pytest.raises(OverBudgetError, match=r"11 tokens exceeds the token budget of 10"):
        engine.update([one_sample(11)], MetricAccumulator())
