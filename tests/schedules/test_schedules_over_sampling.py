"""Whole runs that begin more groups than they need."""

from tiny_runs import tiny_sections

from paceline.config import load_config
from paceline.schedules import run_training
from paceline.telemetry.metrics import read_metrics


def trained(tmp_path, name, **rollout):
    # sharp enough that lengths differ
    sections = tiny_sections(
        tmp_path, run={"name": name, "num_steps": 2}, rollout={"max_new_tokens": 24, **rollout}
    )
    path = run_training(load_config(sections=sections)).run_dir
    return [record.metrics for record in read_metrics(path) if record.step > 0]


def test_a_step_trains_on_the_groups_that_are_complete_first_and_says_what_it_dropped(tmp_path):
    plain, over = trained(tmp_path, "plain"), trained(tmp_path, "over", oversample=2)
    for one, other in zip(over, plain, strict=True):
        assert one["prompts/consumed"] == other["prompts/consumed"] + 2
        assert one["rollout/dropped_groups"] == 2
        assert one["rollout/dropped_samples"] == 2 * tiny_sections(tmp_path)["batch"]["num_samples"]
        assert one["samples/aborted"] == 0
        assert one["rollout/dropped_length_ratio"] > 0
        assert "rollout/dropped_groups" not in other
        assert one.get("updates/applied", 0) + one.get("updates/empty", 0) == 1
    assert over[0]["tokens/response"] + over[0]["rollout/dropped_tokens"] > over[0]["tokens/response"] > 0
