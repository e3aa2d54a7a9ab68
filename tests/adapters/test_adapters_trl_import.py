"""TRL's records as a run's folder, on a real run of TRL 1.16 (trl_run/) and on states made from it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.adapters.run import write_run
from paceline.adapters.trl.importing import import_trl
from paceline.cli import main
from paceline.config import ConfigError
from paceline.report import report_figures, write_report
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import read_ledger

RECORDS = Path(__file__).parent / "trl_run"
STATE = RECORDS / "trainer_state.json"


def history() -> list[dict[str, Any]]:
    return json.loads(STATE.read_text())["log_history"]


def write_state(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"global_step": entries[-1]["step"], "log_history": entries}))
    return path


def test_a_real_trainer_state_becomes_a_run(tmp_path: Path) -> None:
    run_dir = write_run(import_trl(STATE), tmp_path / "run")
    training = {entry["step"]: entry for entry in history() if "loss" in entry}
    records = read_metrics(run_dir)
    assert [record.step for record in records] == list(training)
    for record in records:
        logged = training[record.step]
        assert record.metrics["reward/mean"] == logged["reward"]
        assert record.metrics["time/step"] == logged["step_time"]
        assert record.metrics["response_length/mean"] == logged["completions/mean_length"]
        assert record.metrics["grad_norm"] == logged["grad_norm"]
    (ledger,) = read_ledger(run_dir)
    assert [step.wall_s for step in ledger.steps()] == [entry["step_time"] for entry in training.values()]
    assert all(step.unaccounted_s == step.wall_s for step in ledger.steps())
    evaluations = [
        s.stages["eval"].self_s for p in ledger.processes for s in p.sections if "eval" in s.stages
    ]
    assert evaluations == [entry["eval_runtime"] for entry in history() if "eval_runtime" in entry]


def test_tokens_per_second_are_differences_of_the_running_count(tmp_path: Path) -> None:
    entries = [entry for entry in history() if "loss" in entry]
    records = read_metrics(write_run(import_trl(STATE), tmp_path / "run"))
    tokens = entries[3]["num_tokens"] - entries[2]["num_tokens"]
    assert records[3].metrics["throughput/tokens_per_s"] == pytest.approx(tokens / entries[3]["step_time"])


def test_the_console_output_of_the_same_run_says_the_same_to_its_digits() -> None:
    printed, state = import_trl(RECORDS / "console.log"), import_trl(STATE)
    assert [step.step for step in printed.steps] == [step.step for step in state.steps]
    for one, other in zip(printed.steps, state.steps, strict=True):
        assert one.wall_s == pytest.approx(other.wall_s, rel=1e-3)
        assert one.metrics["reward/mean"] == pytest.approx(other.metrics["reward/mean"], rel=1e-3)
    assert any("counted from 1" in note for note in printed.notes)
    assert any("s of training" in note for note in printed.notes)


def test_of_several_checkpoints_the_newest_history_is_read(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-3" / "trainer_state.json", history()[:3])
    shutil.copy(STATE, write_state(tmp_path / "checkpoint-12" / "trainer_state.json", history()))
    assert [step.step for step in import_trl(tmp_path).steps] == [1, 2, 3, 4, 5, 6]


def test_means_over_several_steps_are_said(tmp_path: Path) -> None:
    entries = [entry | {"step": entry["step"] * 10} for entry in history() if "loss" in entry]
    run = import_trl(write_state(tmp_path / "trainer_state.json", entries))
    assert any("mean over up to 10 steps" in note for note in run.notes)
    tokens = (entries[1]["num_tokens"] - entries[0]["num_tokens"]) / 10
    assert run.steps[1].metrics["throughput/tokens_per_s"] == pytest.approx(tokens / entries[1]["step_time"])


def test_event_files_give_the_times_between_steps(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    shutil.copy(STATE, tmp_path / "trainer_state.json")
    writer = EventFileWriter(str(tmp_path / "runs" / "host"))
    now = 1_700_000_000.0
    for entry in history():
        now += entry["step_time"] + 0.5 if "loss" in entry else entry["eval_runtime"]
        tags = {
            name.replace("eval_", "eval/") if "loss" not in entry else f"train/{name}": name for name in entry
        }
        values = [Summary.Value(tag=tag, simple_value=entry[name]) for tag, name in tags.items()]
        writer.add_event(Event(wall_time=now, step=entry["step"], summary=Summary(value=values)))
    writer.close()
    run = import_trl(tmp_path)
    assert run.steps[0].wall_s == history()[0]["step_time"]  # the state's, not float32
    (ledger,) = read_ledger(write_run(run, tmp_path / "run"))
    gaps = [s.wall_s for p in ledger.processes for s in p.sections if s.step is None and not s.stages]
    assert gaps == pytest.approx([0.5] * 5, abs=1e-3)


def test_a_trainer_without_step_times_has_metrics_only(tmp_path: Path) -> None:
    entries = [{"step": step, "loss": 2.0 / step, "epoch": 0.1 * step} for step in (1, 2, 3)]
    run = import_trl(write_state(tmp_path / "trainer_state.json", entries))
    run_dir = write_run(run, tmp_path / "run")
    assert any("no ledger of steps" in note for note in run.notes)
    assert report_figures(run_dir)["num_steps"] == 0
    assert [record.metrics["loss/total"] for record in read_metrics(run_dir)] == [2.0, 1.0, 2.0 / 3]


def test_the_report_renders_and_the_command_lists_what_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "trl", str(STATE), "--out", str(tmp_path / "run")]) == 0
    assert "TRL logs no part of it" in capsys.readouterr().out
    assert "TRL logs no part of it" in write_report(tmp_path / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ["", "{}", '{"log_history": []}', "[1]"])
def test_what_is_no_trainer_state_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        import_trl(path)
    with pytest.raises(ConfigError, match="no such file"):
        import_trl(tmp_path / "nothing")
