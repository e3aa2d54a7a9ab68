"""A step's figures mean what they are declared to mean, and a figure that cannot be true is said out loud."""

import io

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_sections

from paceline.config import load_config
from paceline.schedules import run_training
from paceline.schedules.together import mfu_alarms
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import read_ledger


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run whose stated peak is so low that every MFU is far above 1: (folder, what was shown)."""
    folder = tmp_path_factory.mktemp("run")
    shown = Console(file=io.StringIO(), width=500)
    sections = tiny_sections(folder, telemetry={"peak_tflops": 1e-9}, algorithm={"old_logprob": "recompute"})
    result = run_training(load_config(None, sections=sections), shown)
    return result.run_dir, shown.file.getvalue()


def steps_of(run_dir):
    records = [record for record in read_metrics(run_dir) if record.step > 0]
    return list(zip(records, read_ledger(run_dir)[0].steps(), strict=True))


def test_tokens_per_second_are_prompt_and_response_tokens_over_the_steps_own_seconds(finished):
    for record, section in steps_of(finished[0]):
        metrics = record.metrics
        tokens = metrics["tokens/prompt"] + metrics["tokens/response"]
        assert metrics["throughput/tokens_per_s"] == pytest.approx(tokens / section.wall_s)
        generated = section.stages["rollout"].tokens / section.stages["rollout"].self_s
        assert metrics["throughput/generated_tokens_per_s"] == pytest.approx(generated)


def test_every_stage_with_flops_has_its_utilisation(finished):
    for record, section in steps_of(finished[0]):
        working = {name for name, stage in section.stages.items() if stage.flops}
        assert {"rollout", "old_logprob", "update_actor"} <= working
        for name in working:
            stage = section.stages[name]
            assert record.metrics[f"tflops/{name}"] == pytest.approx(stage.flops / stage.self_s / 1e12)
            assert record.metrics[f"mfu/{name}"] == pytest.approx(stage.flops / stage.self_s / 1e3)
        flops = sum(stage.flops for stage in section.stages.values())
        assert record.metrics["mfu/step"] == pytest.approx(flops / section.wall_s / 1e3)


def test_a_utilisation_that_cannot_be_is_recorded_and_shown_as_an_alarm(finished):
    run_dir, shown = finished
    assert all(record.metrics["mfu/update_actor"] > 1 for record, _ in steps_of(run_dir))
    assert "ALARM: mfu/update_actor: MFU" in shown


def test_only_utilisations_above_one_raise_an_alarm():
    assert mfu_alarms({"mfu/step": 0.4, "tflops/step": 300.0}) == []
    (alarm,) = mfu_alarms({"mfu/step": 0.4, "mfu/rollout": 2.5})
    assert alarm.startswith("mfu/rollout: MFU 2.50")


def test_memory_progress_and_interruptions_are_recorded(finished):
    for record, section in steps_of(finished[0]):
        metrics = record.metrics
        assert metrics["memory/host_rss"] == section.host_rss > 2**20
        if not torch.cuda.is_available():
            assert metrics["memory/peak_allocated"] == metrics["memory/peak_reserved"] == 0
        assert metrics["prompts/consumed"] == 4
        assert metrics["samples/aborted"] == 0
        assert metrics["weight_version"] == record.step
    epochs = [record.metrics["epoch"] for record, _ in steps_of(finished[0])]
    assert epochs[0] == 0 and epochs == sorted(epochs)


def test_a_step_that_saves_says_how_long_it_was_blocked_and_how_often_it_waited(finished):
    saving = [r.metrics for r, s in steps_of(finished[0]) if "checkpoint" in s.stages]
    assert saving
    assert all(m["checkpoint/blocked_s"] >= 0 and m["checkpoint/waits"] >= 0 for m in saving)


def test_the_wall_clock_of_the_run_includes_what_came_before_its_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.telemetry.process_start._claimed_by", set())
    sections = tiny_sections(tmp_path, task={"eval_size": 0}, run={"num_steps": 1})
    result = run_training(load_config(None, sections=sections))
    (process,) = read_ledger(result.run_dir)[0].processes
    first = process.spans[0]
    assert (first.stage, first.name, first.start_s) == ("setup", "start", 0.0)
    assert first.end_s > 0.5  # the interpreter, torch and the tests before this one
