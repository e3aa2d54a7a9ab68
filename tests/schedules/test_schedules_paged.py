"""Whole runs on the paged engine: the slot engine's samples, and preemptions in the metrics."""

import json

import pytest
from tiny_runs import tiny_sections

from paceline.config import ConfigError, load_config
from paceline.schedules import run_training
from paceline.telemetry.metrics import read_metrics


def trained(tmp_path, name, **rollout):
    sections = tiny_sections(
        tmp_path, run={"name": name, "num_steps": 2}, rollout={"max_new_tokens": 20, **rollout}
    )
    path = run_training(load_config(sections=sections)).run_dir
    return path, [record.metrics for record in read_metrics(path) if record.step > 0]


def test_a_run_on_pages_trains_on_the_same_samples_and_counts_preemptions(tmp_path):
    _, slots = trained(tmp_path, "slots")
    path, pages = trained(tmp_path, "pages", cache="paged", kv_cache_gb=15 * 16 * 384 / 2**30)
    assert [m["reward/mean"] for m in pages] == [m["reward/mean"] for m in slots]
    assert [m["tokens/response"] for m in pages] == [m["tokens/response"] for m in slots]
    assert all(m["rollout/preemptions"] == 0 for m in slots)
    assert any(m["rollout/preemptions"] > 0 and m["rollout/preempted_tokens"] > 0 for m in pages)
    features = json.loads((path / "env.json").read_text())["features"]
    assert features["rollout_cache"] == "paged" and features["rollout_attention"] == "gather"


def test_a_run_with_drafts_trains_on_the_same_samples_and_counts_what_was_accepted(tmp_path):
    _, plain = trained(tmp_path, "plain", exact=True)
    path, drafted = trained(
        tmp_path, "drafted", exact=True, speculation="on", speculate_below=128, draft_tokens=4
    )
    for one, other in zip(drafted, plain, strict=True):
        assert one["tokens/response"] == other["tokens/response"]
        assert one["loss/total"] == other["loss/total"] and one["grad_norm"] == other["grad_norm"]
        assert 0 <= one["rollout/accepted_drafts"] <= one["rollout/drafted_tokens"]
        assert other["rollout/drafted_tokens"] == 0
    assert sum(one["rollout/drafted_tokens"] for one in drafted) > 0
    assert json.loads((path / "env.json").read_text())["features"]["rollout_speculation"] is True


def test_an_exact_run_samples_what_it_scores_bit_for_bit(tmp_path):
    path, steps = trained(tmp_path, "exact", exact=True)
    assert all(m["rollout/logprob_difference_max"] == 0.0 for m in steps)
    assert json.loads((path / "env.json").read_text())["features"]["rollout_exact"] is True


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rollout": {"exact": True, "cache": "slots"}}, "rollout.cache"),
        (
            {"rollout": {"exact": True}, "cluster": {"num_devices": 2, "tensor_parallel_size": 2}},
            "cluster.tensor_parallel_size",
        ),
    ],
)
def test_exact_rollouts_that_cannot_be_had_are_refused(tmp_path, changes, key):
    with pytest.raises(ConfigError) as refused:
        load_config(sections=tiny_sections(tmp_path, **changes))
    assert key in {problem.key for problem in refused.value.problems}
