"""verl's logs as a run's folder: what is in the log comes back, what is not is said, and the report renders."""

import json
import math
from pathlib import Path

import pytest
from verl_logs import VerlLogs

from paceline.adapters.run import write_run
from paceline.adapters.verl.importing import import_verl
from paceline.cli import main
from paceline.config import ConfigError
from paceline.report import report_figures, write_report
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import read_ledger

NAMES = {
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "old_logprob",
    "ref": "ref_logprob",
    "adv": "advantage",
    "values": "values",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "update_weights": "sync",
    "save_checkpoint": "checkpoint",
}


def written(logs: VerlLogs, tmp_path: Path, kind: str = "file") -> Path:
    """The folder of the run that `logs` are imported into."""
    source = tmp_path / "logs"
    source.mkdir()
    if kind == "console":
        logs.write_console(source / "train.log")
    elif kind == "tensorboard":
        logs.write_tensorboard(source / "tb")
    else:
        logs.write_file_logger(source / "run.jsonl")
    return write_run(import_verl(source), tmp_path / "run")


@pytest.mark.parametrize("kind", ["console", "file", "tensorboard"])
@pytest.mark.parametrize("is_v1", [True, False])
def test_every_logger_gives_the_same_stages(kind: str, is_v1: bool, tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=3, is_v1=is_v1, has_critic=True, save_every=3)
    (ledger,) = read_ledger(written(logs, tmp_path, kind))
    steps = ledger.steps()
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        expected = {NAMES[name]: seconds for name, seconds in logs.stages(step.step or 0).items()}
        assert {name: stage.self_s for name, stage in step.stages.items()} == pytest.approx(
            expected, rel=1e-6
        )
        assert step.unaccounted_s == pytest.approx(logs.residual_s, abs=1e-3)
        covered = math.fsum(stage.self_s for stage in step.stages.values())
        assert covered + step.unaccounted_s == pytest.approx(step.wall_s, abs=1e-9)


def test_numpy_numbers_on_the_console_are_read(tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=2)
    plain = import_verl(logs.write_console(tmp_path / "a.log"))
    numpy = import_verl(logs.write_console(tmp_path / "b.log", ray=False, numpy=True))
    assert [step.foreign for step in numpy.steps] == [step.foreign for step in plain.steps]


def test_metrics_have_our_names_and_all_of_verls_are_kept(tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=2, test_every=2)
    run_dir = written(logs, tmp_path)
    first, second = read_metrics(run_dir)
    logged = logs.metrics(1)
    assert first.metrics["reward/mean"] == logged["critic/rewards/mean"]
    assert first.metrics["time/step"] == logged["timing_s/step"]
    assert first.metrics["time/rollout"] == logged["timing_s/gen"]
    assert first.metrics["tokens/response"] == logs.response_tokens(1)
    assert first.metrics["tokens/prompt"] == 1024 * 500
    assert first.metrics["memory/peak_allocated"] == pytest.approx(40.01 * 2**30)
    assert (second.metrics["eval/accuracy"], second.metrics["eval/mean_score"]) == (0.5, 0.55)
    foreign = [json.loads(line) for line in (run_dir / "foreign_metrics.jsonl").read_text().splitlines()]
    assert foreign[0]["metrics"] == logged


def test_devices_follow_from_the_two_throughputs(tmp_path: Path) -> None:
    environment = json.loads((written(VerlLogs(num_devices=64), tmp_path) / "env.json").read_text())
    assert environment["num_devices"] == 64


def test_testing_lies_after_the_step_and_gaps_between_lines_are_kept(tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=3, test_every=1)
    (ledger,) = read_ledger(written(logs, tmp_path, "tensorboard"))
    (process,) = ledger.processes
    outside = [section for section in process.sections if section.step is None]
    evaluations = [section for section in outside if "eval" in section.stages]
    gaps = [section.wall_s for section in outside if not section.stages]
    assert [section.stages["eval"].self_s for section in evaluations] == [30.0] * 3
    assert gaps == pytest.approx([3.0, 3.0], abs=1e-2)  # tensorboard's values are float32
    assert process.unix_s == pytest.approx(1_700_000_000.0, abs=1e-2)


def test_generation_of_an_asynchronous_trainer_is_a_wait(tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=2, is_asynchronous=True)
    run_dir = written(logs, tmp_path)
    (ledger,) = read_ledger(run_dir)
    step = ledger.steps()[0]
    assert "rollout" not in step.stages
    assert step.stages["idle"].self_s == logs.stages(1)["gen"]
    assert "throughput/generated_tokens_per_s" not in read_metrics(run_dir)[0].metrics
    notes = json.loads((run_dir / "summary.json").read_text())["notes"]
    assert "training/off_policy/staleness/mean" in notes[0]


def test_the_mode_can_be_stated(tmp_path: Path) -> None:
    path = VerlLogs(num_steps=1).write_file_logger(tmp_path / "run.jsonl")
    assert "idle" in import_verl(path, "async").steps[0].stages
    assert "rollout" in import_verl(path, "sync").steps[0].stages


def test_stages_longer_than_the_step_are_said_and_not_cut(tmp_path: Path) -> None:
    run_dir = written(VerlLogs(num_steps=2, residual_s=-20.0), tmp_path)
    (ledger,) = read_ledger(run_dir)
    step = ledger.steps()[0]
    assert step.unaccounted_s == 0.0
    assert step.wall_s == pytest.approx(sum(stage.self_s for stage in step.stages.values()))
    notes = json.loads((run_dir / "summary.json").read_text())["notes"]
    assert any("add up to more than the step (by up to 20 s)" in note for note in notes)


def test_unknown_times_are_named_and_left_unaccounted(tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=2, residual_s=9.0, extra={"timing_s/new_thing": 4.0})
    run = import_verl(logs.write_file_logger(tmp_path / "run.jsonl"))
    assert any("new_thing (8 s in all)" in note for note in run.notes)
    run_dir = write_run(run, tmp_path / "run")
    assert read_ledger(run_dir)[0].steps()[0].unaccounted_s == pytest.approx(9.0)


def test_the_long_tail_and_uneven_tokens_are_said(tmp_path: Path) -> None:
    run = import_verl(VerlLogs(num_steps=3).write_file_logger(tmp_path / "run.jsonl"))
    assert any("the longest is 1.6 times the mean" in note for note in run.notes)
    assert any("300,000 to 303,000 tokens a step, 1.0% apart" in note for note in run.notes)


def test_an_mfu_of_zero_is_unknown_and_left_out(tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=1, extra={"perf/mfu/actor": 0.0})
    assert (
        "mfu/update_actor" not in import_verl(logs.write_file_logger(tmp_path / "r.jsonl")).steps[0].metrics
    )


def test_a_resumed_run_counts_steps_as_they_were_done_last(tmp_path: Path) -> None:
    path = VerlLogs(num_steps=4, seed=1).write_console(tmp_path / "train.log")
    again = VerlLogs(num_steps=3, seed=2)
    path.write_text(path.read_text() + again.write_console(tmp_path / "b.txt").read_text())
    (tmp_path / "b.txt").unlink()
    run = import_verl(path)
    timed = [step for step in run.steps if step.wall_s is not None]
    assert [step.step for step in timed] == [1, 2, 3]
    assert timed[0].foreign["timing_s/gen"] == again.stages(1)["gen"]
    assert any("done again after a resume" in note for note in run.notes)


def test_damage_is_counted(tmp_path: Path) -> None:
    path = VerlLogs(num_steps=3).write_file_logger(tmp_path / "run.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1][:40], lines[2]]) + "\n")
    run = import_verl(path)
    assert any("begins at step 3" in note for note in run.notes)
    assert any("1 lines are torn" in note for note in run.notes)


def test_several_loggers_of_one_run_are_merged(tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=2)
    logs.write_console(tmp_path / "train.log")
    logs.write_file_logger(tmp_path / "run.jsonl")
    logs.write_tensorboard(tmp_path / "tb")
    run = import_verl(tmp_path)
    assert set(run.sources.values()) == {"console", "file", "tensorboard"}
    timed = [step for step in run.steps if step.wall_s is not None]
    assert timed[0].foreign["timing_s/gen"] == logs.metrics(1)["timing_s/gen"]  # the exact one, not float32
    assert timed[0].unix_s is not None


def test_rollout_dumps_become_samples_of_the_first_and_last_step(tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=3)
    logs.write_file_logger(tmp_path / "logs.jsonl")
    logs.write_dumps(tmp_path / "rollouts")
    run = import_verl(tmp_path)
    run_dir = write_run(run, tmp_path / "run")
    assert sorted(path.name for path in (run_dir / "samples").iterdir()) == ["step1.jsonl", "step3.jsonl"]
    rows = [json.loads(line) for line in (run_dir / "samples" / "step3.jsonl").read_text().splitlines()]
    assert [(row["prompt_id"], row["sample_index"], row["score"]) for row in rows] == [
        ("0", 0, 0.0),
        ("0", 1, 1.0),
        ("1", 0, 0.0),
        ("1", 1, 1.0),
    ]
    assert any("Of 3 rollout dumps" in note for note in run.notes)
    assert not any("torn" in note for note in run.notes)
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "answer 0 of step 3" in page


@pytest.mark.parametrize("content", ["", "nothing here\n", '{"a": 1}\n'])
def test_what_is_no_log_of_verls_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no step of verl's"):
        import_verl(path)


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path) -> None:
    run = import_verl(VerlLogs(num_steps=1).write_file_logger(tmp_path / "run.jsonl"))
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        write_run(run, tmp_path)


@pytest.mark.parametrize(("num_steps", "num_devices"), [(5, 8), (1000, 8), (100, 64)])
def test_the_report_of_an_imported_run_renders(num_steps: int, num_devices: int, tmp_path: Path) -> None:
    logs = VerlLogs(num_steps=num_steps, num_devices=num_devices, test_every=10, save_every=20)
    run_dir = written(logs, tmp_path, "console")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "another framework" in page
    assert "how the run ended is not known" in page
    assert "high-water mark" in page
    assert "No counters were recorded" in page
    assert "as the other framework logged it" in page
    figures = report_figures(run_dir)
    assert figures["num_steps"] == num_steps
    assert figures["mfu"] == pytest.approx(0.31)
    assert figures["stages"]["update_actor"] == pytest.approx(60.0, rel=0.1)
    assert figures["unaccounted_s"] == pytest.approx(logs.residual_s)


def test_the_command_imports_and_lists_what_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = VerlLogs(num_steps=2).write_file_logger(tmp_path / "run.jsonl")
    assert main(["import", "verl", str(path), "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "note: " in output
    assert f"run: {tmp_path / 'out'}" in output
    assert main(["report", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("arguments", [["no/such"], ["--mode", "both", "x"]])
def test_the_command_refuses_with_two(arguments: list[str]) -> None:
    assert main(["import", "verl", *arguments]) == 2
