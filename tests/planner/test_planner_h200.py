"""The estimate against the peaks that one H200 measured (benchmarks/results/h200): within a tenth."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.bench.shapes import shape_config
from paceline.config import load_config
from paceline.planner.memory import GIB, MemoryEstimate, estimate_model
from paceline.planner.model_shape import MemoryShape
from paceline.planner.run_facts import RunFacts
from paceline.planner.run_memory import trained_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
MEASURED = ["0.6b-16k", "1.7b-16k", "1.7b-16k-all", "1.7b-16k-selective", "4b-16k", "8b-16k"]


def read(name: str) -> tuple[dict, MemoryEstimate]:
    """A result, and the estimate of what it ran: one micro-batch that fills the budget in every pass."""
    result = json.loads((RESULTS / f"train-{name}.json").read_text())
    ran = result["arguments"]
    sections = {
        "model": {"path": ran["model"]},
        "task": {"path": "none"},
        "batch": {"token_budget": ran["num_tokens"], "forward_token_budget": ran["num_tokens"]},
        "train": {
            "preset": ran["preset"],
            "gradient_checkpointing": ran["recompute"],
            "selective_keep": ran["selective_keep"],
            "logprob_chunk": ran["logprob_chunk"],
        },
        "cluster": {"device": "cuda"},
    }
    config = load_config(None, sections=sections)
    facts = RunFacts(MemoryShape.from_hf_config(shape_config(ran["model"]).to_dict()), element_bytes=2)
    model = replace(trained_model(config, facts, config.batch), micro_batches=1)
    return result, MemoryEstimate(estimate_model(model))


@pytest.mark.parametrize("name", MEASURED)
def test_an_update_s_peak_is_estimated_within_a_tenth(name):
    result, estimate = read(name)
    update = max(
        estimate.of_phase("actor", phase) for phase in ("head", "layers", "end of backward", "optimizer")
    )
    if "update_actor" in result:
        assert update / GIB == pytest.approx(result["update_actor"]["peak_gib"], rel=0.1)
    before_the_first = max(
        estimate.of_phase("actor", phase) for phase in ("head", "layers", "end of backward")
    ) - estimate.part("moments")
    assert before_the_first / GIB == pytest.approx(result["forward_backward"]["peak_gib"], rel=0.1)


@pytest.mark.parametrize("name", MEASURED)
def test_a_scoring_pass_s_peak_is_estimated_within_a_tenth(name):
    result, estimate = read(name)
    scoring = estimate.of_phase("actor", "scoring") - estimate.part("moments")
    assert scoring / GIB == pytest.approx(result["score"]["peak_gib"], rel=0.1)
