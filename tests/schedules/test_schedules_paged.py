"""Whole runs on the paged engine: the slot engine's samples, and preemptions in the metrics."""

import json

from tiny_runs import tiny_sections

from paceline.config import load_config
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
