"""Whole small runs: records complete, resume bit-equal, nothing silent, bad runs end with a reason."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import ROLLOUT_CLOCKS, tiny_sections, write_other_weights, write_prompts

from paceline.config import ConfigError, load_config
from paceline.schedules import run_training
from paceline.schedules.training import NothingTrainedError
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import read_ledger, summarise

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def rewards_are_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "model"))


def train(tmp_path, **changes):
    return run_training(load_config(None, sections=tiny_sections(tmp_path, **changes)))


def learned(run_dir):
    """Every metric that does not measure time, memory, or what this process has computed before, by step."""
    shapes = ("batch/new_shapes", "batch/distinct_shapes")  # a resumed process meets every shape anew
    skipped = ("time/", "throughput/", "memory/", "tflops/", "mfu/", "checkpoint/", *ROLLOUT_CLOCKS, *shapes)
    return {
        record.step: {name: value for name, value in record.metrics.items() if not name.startswith(skipped)}
        for record in read_metrics(run_dir)
    }


def masters(run_dir, step):
    return load_file(run_dir / "checkpoints" / f"step_{step}" / "masters.safetensors")


def test_a_run_leaves_complete_records_and_accounts_for_its_time(tmp_path):
    result = train(tmp_path)
    assert result.summary["status"] == "completed" and result.summary["num_steps"] == 3
    assert {"accuracy_before", "accuracy_after", "accuracy_constant"} <= result.summary.keys()
    names = {path.name for path in result.run_dir.iterdir()}
    assert {
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "summary.json",
        "ledger",
        "samples",
        "checkpoints",
    } <= names
    records = read_metrics(result.run_dir)
    assert [record.step for record in records] == [0, 1, 2, 3]
    for record in records[1:]:
        assert record.metrics["updates/applied"] == 1
        assert record.metrics["rollout/logprob_difference_max"] < 1e-4
    rows = [
        json.loads(line) for line in (result.run_dir / "samples" / "step2.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 16 and {row["outcome"] for row in rows} == {"score"}
    (rank,) = read_ledger(result.run_dir)
    figures = summarise(rank)
    assert {"data", "rollout", "reward", "advantage", "update_actor", "sync"} <= figures["stages"].keys()
    for step in rank.steps():
        covered = sum(stage.self_s for stage in step.stages.values())
        assert covered + step.unaccounted_s == pytest.approx(step.wall_s)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dr_grpo"},
        {"name": "rloo"},
        {"name": "reinforce_plus_plus"},
        {"name": "gspo"},
        {"name": "cispo"},
        {"name": "dapo", "overlong_cache": 2},
        {"kl_coefficient": 0.05},
        {"kl_coefficient": 0.05, "kl_placement": "reward"},
        {"entropy_coefficient": 0.01},
        {"old_logprob": "recompute"},
    ],
    ids=str,
)
def test_every_algorithm_trains(tmp_path, algorithm):
    result = train(tmp_path, algorithm=algorithm, task={"eval_size": 0}, run={"num_steps": 2})
    assert result.summary["status"] == "completed"


def test_several_updates_per_rollout_use_the_sampled_logprobs(tmp_path):
    result = train(tmp_path, batch={"mini_batch_prompts": 2, "num_epochs": 2}, task={"eval_size": 0})
    assert result.summary["old_logprob"]["source"] == "rollout"
    assert all(record.metrics["updates/applied"] == 4 for record in read_metrics(result.run_dir))


def test_the_padded_layout_trains_to_the_same_numbers(tmp_path):
    packed = train(tmp_path, run={"name": "packed"})
    padded = train(tmp_path, run={"name": "padded"}, batch={"layout": "padded"})
    found, expected = learned(padded.run_dir), learned(packed.run_dir)
    for step in expected:
        for name in ("reward/mean", "loss/total", "grad_norm"):
            if name in expected[step]:
                assert found[step][name] == pytest.approx(expected[step][name], rel=1e-3, abs=1e-5)


def test_without_a_learning_rate_the_engine_stays_on_the_trainers_distribution(tmp_path):
    result = train(tmp_path, train={"lr": 0.0}, run={"num_steps": 10}, task={"eval_size": 0})
    differences = [r.metrics["rollout/logprob_difference_mean"] for r in read_metrics(result.run_dir)]
    assert max(differences) < 2e-5


def test_a_stopped_run_resumes_bit_equal_to_an_uninterrupted_one(tmp_path):
    schedule = {"lr": 1e-3, "lr_schedule": "linear"}
    whole = train(tmp_path, run={"name": "whole", "num_steps": 4}, train=schedule)
    config = load_config(
        None, sections=tiny_sections(tmp_path, run={"name": "cut", "num_steps": 4}, train=schedule)
    )
    original = signal.getsignal(signal.SIGTERM)
    _stop_after_step(config, 2)
    cut = run_training(config)
    assert signal.getsignal(signal.SIGTERM) is original
    assert cut.summary["status"] == "completed"
    assert learned(cut.run_dir) == learned(whole.run_dir)
    for name, tensor in masters(whole.run_dir, 4).items():
        assert torch.equal(masters(cut.run_dir, 4)[name], tensor)


def test_sigterm_before_the_first_step_or_after_a_step_looked_for_it_loses_nothing(tmp_path, monkeypatch):
    from paceline.schedules import recorder

    def signalled(original):
        def then_signal(self, *args):
            original(self, *args)
            os.kill(os.getpid(), signal.SIGTERM)

        return then_signal

    with monkeypatch.context() as patched:
        patched.setattr(recorder.Recorder, "evaluate_before", signalled(recorder.Recorder.evaluate_before))
        early = train(tmp_path, run={"name": "early"})
    assert early.summary["status"] == "stopped" and early.summary["num_steps"] == 0
    with monkeypatch.context() as patched:
        patched.setattr(recorder.Recorder, "end", signalled(recorder.Recorder.end))
        late = train(tmp_path, run={"name": "late"})
    assert late.summary["status"] == "stopped" and late.summary["num_steps"] == 1
    assert (late.run_dir / "checkpoints" / "step_1").exists()
    whole = train(tmp_path, run={"name": "whole"})
    for name in ("early", "late"):
        assert learned(train(tmp_path, run={"name": name}).run_dir) == learned(whole.run_dir)


def _stop_after_step(config, step):
    """Runs until SIGTERM, which the process sends itself in the middle of `step`."""
    from paceline.schedules import recorder

    original = recorder.Recorder.rollout

    def rollout_then_signal(self, *args):
        original(self, *args)
        if self._run.state.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)

    recorder.Recorder.rollout = rollout_then_signal
    try:
        result = run_training(config)
    finally:
        recorder.Recorder.rollout = original
    assert result.summary["status"] == "stopped" and result.summary["num_steps"] == step


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_minus_nine_at_any_moment_loses_nothing(tmp_path):
    changes = {"run": {"num_steps": 6}, "checkpoint": {"every": 1, "keep": 2}}
    whole = train(tmp_path, **{**changes, "run": {"name": "whole", "num_steps": 6}})
    sections = tiny_sections(tmp_path, **changes)
    (tmp_path / "sections.json").write_text(json.dumps(sections))
    program = (
        "import json, sys; from paceline.config import load_config; from paceline.schedules import run_training; "
        "run_training(load_config(None, sections=json.load(open(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "sections.json")]
    paths = [str(TESTS / "model"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run_dir = Path(sections["run"]["dir"]) / "r"
    moments = random.Random(0)
    for _ in range(int(os.environ.get("PACELINE_NUM_KILLS", "3"))):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        begun = _size(run_dir / "ledger" / "rank0.jsonl")
        while process.poll() is None and _size(run_dir / "ledger" / "rank0.jsonl") <= begun:
            time.sleep(0.02)  # the interpreter and torch start; nothing can be lost yet
        time.sleep(moments.uniform(0.0, 1.2))
        process.kill()
        process.wait()
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert learned(run_dir) == learned(whole.run_dir)
    for name, tensor in masters(whole.run_dir, 6).items():
        assert torch.equal(masters(run_dir, 6)[name], tensor)


def _size(path):
    return path.stat().st_size if path.exists() else 0


def test_a_finished_run_started_again_trains_nothing_more(tmp_path):
    first = train(tmp_path)
    before = learned(first.run_dir)
    again = train(tmp_path)
    assert again.summary["status"] == "completed"
    assert learned(again.run_dir) == before


def test_a_resume_with_other_settings_says_which_and_keeps_those_before(tmp_path, capsys):
    train(tmp_path, run={"num_steps": 1}, batch={"token_budget": "auto"})
    capsys.readouterr()
    changes = {"train": {"lr": 1e-4}, "run": {"num_steps": 2}, "batch": {"token_budget": "auto"}}
    result = train(tmp_path, **changes)
    said = " ".join(capsys.readouterr().out.split())
    assert "settings changed since: run.num_steps: 1 -> 2; train.lr: 0.001 -> 0.0001 resumed" in said
    before = load_config(result.run_dir / "config.until_step_1.yaml")
    now = load_config(result.run_dir / "config.yaml")
    assert (before.train.lr, now.train.lr) == (1e-3, 1e-4)

    edited = result.run_dir / "config.yaml"  # the run's own file, changed by hand
    edited.write_text(edited.read_text().replace("num_steps: 2", "num_steps: 3"))
    run_training(load_config(edited))
    assert "settings changed since: run.num_steps: 2 -> 3" in " ".join(capsys.readouterr().out.split())
    run_training(load_config(edited))
    assert "settings changed" not in capsys.readouterr().out


def test_a_kl_is_not_measured_against_another_model_after_a_resume(tmp_path):
    kl = {"algorithm": {"kl_coefficient": 0.1}}
    train(tmp_path, run={"num_steps": 1}, **kl)
    write_other_weights(tmp_path)
    with pytest.raises(ConfigError, match="the model that the run began with") as refused:
        train(tmp_path, run={"num_steps": 2}, model={"path": str(tmp_path / "other")}, **kl)
    assert (refused.value.key, refused.value.nearest) == ("model.path", str(tmp_path / "model"))
    before = load_config(tmp_path / "runs" / "r" / "config.yaml")
    assert before.model.path == str(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / "moved")
    moved = train(tmp_path, run={"num_steps": 2}, model={"path": str(tmp_path / "moved")}, **kl)
    assert moved.summary["num_steps"] == 2  # the same weights elsewhere


def test_dynamic_sampling_that_dries_up_stops_at_its_bound_and_says_so(tmp_path):
    with pytest.raises(NothingTrainedError, match="single optimiser update"):
        train(
            tmp_path,
            task={"reward": "tiny_rewards:always_right", "eval_size": 0},
            algorithm={"name": "dapo", "max_generations": 3},
            run={"num_steps": 1},
        )
    (record,) = read_metrics(tmp_path / "runs" / "r")
    assert record.metrics["rollout/generations"] == 3
    assert record.metrics["rollout/exhausted"] == 1
    assert record.metrics["groups/dropped_no_signal"] == 4 + 4 + 4
    assert json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())["status"] == "failed"


def test_a_prompt_that_comes_again_within_a_step_gets_new_samples(tmp_path):
    tiny_sections(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl", count=4)
    result = train(
        tmp_path,
        task={"reward": "tiny_rewards:one_prompt_alone", "eval_size": 0},
        algorithm={"dynamic_sampling": True, "max_generations": 6},
        run={"num_steps": 1},
    )
    path = result.run_dir / "samples" / "step1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    prompts = Counter(row["prompt_id"] for row in rows)
    assert max(prompts.values()) > 4  # of four prompts, four samples each: one came again
    assert len({(row["prompt_id"], row["seed"]) for row in rows}) == len(rows)


def test_a_run_whose_every_sample_is_truncated_and_masked_does_not_call_itself_completed(tmp_path):
    with pytest.raises(NothingTrainedError):
        train(
            tmp_path, algorithm={"mask_truncated": True}, rollout={"max_new_tokens": 1}, run={"num_steps": 2}
        )
    assert [r.metrics.get("updates/empty") for r in read_metrics(tmp_path / "runs" / "r")] == [None, 1.0, 1.0]


def test_errors_and_timeouts_of_rewards_are_left_out_of_their_group_and_counted(tmp_path):
    result = train(tmp_path, task={"reward": "tiny_rewards:sometimes_raises", "eval_size": 0})
    record = read_metrics(result.run_dir)[0]
    assert record.metrics["reward/errors"] == record.metrics["samples/without_verdict"] > 0
    rows = [
        json.loads(line) for line in (result.run_dir / "samples" / "step1.jsonl").read_text().splitlines()
    ]
    failed = [row for row in rows if row["outcome"] == "error"]
    assert failed and all(row["score"] is None and row["advantage"] == 0.0 for row in failed)


def test_a_gradient_that_is_not_finite_skips_the_update_and_a_run_of_them_stops(tmp_path, monkeypatch):
    from paceline.engine import trainer

    original = trainer.policy_objective
    calls = []

    def poisoned(*args):
        output = original(*args)
        calls.append(1)
        scale = float("nan") if len(calls) == 3 else 1.0
        return type(output)(loss=output.loss * scale, pending=output.pending)

    monkeypatch.setattr(trainer, "policy_objective", poisoned)
    result = train(tmp_path, run={"num_steps": 5}, task={"eval_size": 0})
    skipped = [record.metrics["updates/skipped"] for record in read_metrics(result.run_dir)]
    assert sum(skipped) == 1
    assert all(torch.isfinite(tensor).all() for tensor in masters(result.run_dir, 5).values())


def test_a_stop_token_that_the_model_does_not_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tokens 0 to 96, so nothing would stop at 97") as refused:
        train(tmp_path, rollout={"stop_token_ids": [5, 97]})
    assert refused.value.key == "rollout.stop_token_ids"


def test_a_run_folder_is_not_overwritten_when_resuming_is_off(tmp_path):
    train(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        train(tmp_path, run={"resume": "never"})


def test_a_resumed_run_with_another_seed_is_refused(tmp_path):
    train(tmp_path)
    with pytest.raises(ConfigError, match="master seed"):
        train(tmp_path, run={"seed": 5, "num_steps": 5})


def test_a_resume_on_other_prompts_names_the_settings_that_changed_them(tmp_path):
    train(tmp_path, run={"num_steps": 1})
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, task={"eval_size": 8, "instruction": "w1", "reward_timeout_s": 20.0})
    assert [(p.key, p.value, p.nearest) for p in refused.value.problems] == [
        ("task.eval_size", 8, "6"),
        ("task.instruction", "w1", "null"),
    ]
    assert "the checkpoint was written with 6" in str(refused.value)


def test_a_resume_asks_what_the_prompts_are_and_not_where_they_lie(tmp_path):
    train(tmp_path, run={"num_steps": 1})
    prompts = tmp_path / "prompts.jsonl"
    moved = prompts.rename(tmp_path / "moved.jsonl")
    assert train(tmp_path, run={"num_steps": 2}, task={"path": str(moved)}).summary["num_steps"] == 2
    moved.write_text(moved.read_text().replace("w7", "w8"))
    with pytest.raises(ConfigError, match="written with other training prompts"):
        train(tmp_path, task={"path": str(moved)})
