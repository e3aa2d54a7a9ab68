"""The supervised loss is transformers' own cross-entropy over the same tokens, however the rows are cut into passes."""

import math

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from paceline.config import load_sft_config
from paceline.config.schema import LoraSection
from paceline.engine.sft import SftEngine, SftSample
from paceline.model.lora import add_adapters
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

HEADER = tuple(range(5, 25))


def config(**sections):
    base = {
        "model": {"path": "tiny"},
        "task": {"path": "rows.jsonl"},
        "batch": {"num_prompts": 5, "token_budget": 512},
        "train": {"lr": 1e-2, "eps": 1e-2, "logprob_chunk": 64, "grad_clip": 0.0},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return load_sft_config(None, sections=base)


def rows(num_rows: int = 5) -> list[tuple[list[int], list[int]]]:
    """Tokens and masks of conversations of different lengths, some with several learned turns."""
    generator = np.random.default_rng(0)
    found = []
    for index in range(num_rows):
        ids, mask = [*HEADER, *generator.integers(3, 90, 1 + index).tolist()], [0] * (21 + index)
        for turn in range(1 + index % 3):
            for flag, length in ((1, 2 + index), (0, 3)):
                ids += generator.integers(3, 90, length + turn).tolist()
                mask += [flag] * (length + turn)
        found.append((ids, mask))
    return found


def transformers_loss(model, batch):
    """Cross-entropy as transformers computes it: padded, labels of -100 where nothing is learned, mean over all."""
    width = max(len(ids) for ids, _ in batch)
    input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    attention = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch])
    labels = torch.full_like(input_ids, -100)
    for row, (ids, mask) in enumerate(batch):
        for position, flag in enumerate(mask):
            if flag:
                labels[row, position] = ids[position]
    model.module.set_attn_implementation("eager")
    return model.module(input_ids=input_ids, attention_mask=attention, labels=labels).loss


def update(settings, family="llama", batch=None, lora=False):
    model = tiny_model(family)
    if lora:
        model = add_adapters(model, LoraSection(rank=4), "base", seed=0)
    engine = SftEngine(model, settings, Ledger(), num_updates=1)
    metrics = MetricAccumulator()
    engine.update([SftSample.from_tokens(*row) for row in batch or rows()], metrics)
    return metrics.reduce(), {name: p.detach().clone() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_norm_equal_transformers_cross_entropy(family):
    reference = tiny_model(family)
    loss = transformers_loss(reference, rows())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.module.parameters()])
    metrics, _ = update(config(), family)
    assert metrics["loss/total"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    held_out = SftEngine(tiny_model(family), config(), Ledger(), num_updates=1).evaluate(
        [SftSample.from_tokens(*row) for row in rows()]
    )
    assert held_out.loss == pytest.approx(float(loss), rel=1e-5)
    assert held_out.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-4)
    assert held_out.num_tokens == sum(sum(mask) for _, mask in rows())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "sections",
    [
        {"batch": {"token_budget": 64}},
        {"batch": {"token_budget": 128}},
        {"batch": {"share_prefixes": False}},
        {"batch": {"layout": "padded"}},
        {"batch": {"layout": "padded", "token_budget": 64}},
        {"train": {"logprob_chunk": 3}},
        {"train": {"gradient_checkpointing": True}},
    ],
    ids=str,
)
def test_the_update_does_not_depend_on_how_rows_are_cut_packed_or_padded(sections, lora):
    expected, weights = update(config(), lora=lora)
    found, moved = update(config(**sections), lora=lora)
    for name in ("loss/total", "grad_norm", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(moved[name], tensor, atol=1e-5, rtol=1e-5)


def test_a_long_row_weighs_as_many_tokens_as_it_has():
    first, second = rows()[0], rows()[4]
    losses = {}
    for name, batch in (("first", [first]), ("second", [second]), ("both", [first, second])):
        losses[name] = update(config(), batch=batch)[0]["loss/total"]
    tokens = [sum(mask) for _, mask in (first, second)]
    mean = (losses["first"] * tokens[0] + losses["second"] * tokens[1]) / sum(tokens)
    assert losses["both"] == pytest.approx(mean, rel=1e-5)


def test_tokens_after_the_last_learned_one_are_not_computed_and_a_row_needs_a_learned_token():
    sample = SftSample.from_tokens([1, 2, 3, 4, 5], [0, 0, 1, 0, 0])
    assert (sample.prompt_ids, sample.response_ids) == ((1, 2), (3,))
    for mask in ([0, 0, 0], [1, 0, 0]):
        with pytest.raises(ValueError, match="a learned token"):
            SftSample.from_tokens([1, 2, 3], mask)
