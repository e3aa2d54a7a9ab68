"""What is imported goes through every command that reads a run: diagnose, report, explain, watch."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from explained_runs import RawRun
from test_adapters_timeline_rows import colocated, separate
from test_adapters_timeline_rows import write as write_rows
from torch_traces import training_step
from verl_logs import VerlLogs

from paceline.cli import main
from paceline.explanation import explain
from paceline.explanation.explain import AUDIENCES
from paceline.monitor.alarms import alarms_of
from paceline.monitor.following import follow

TRL = Path(__file__).parent / "trl_run"


@dataclass(frozen=True)
class Source:
    """What `paceline import` is given, and sentences that an explanation of it must and must not hold."""

    command: str
    write: Callable[[Path], Path]
    says: tuple[str, ...] = ()
    says_not: tuple[str, ...] = ()


def console(folder: Path, **logs: object) -> Path:
    return VerlLogs(**logs).write_console(folder / "train.log")  # type: ignore[arg-type]


def file_logger(folder: Path, **logs: object) -> Path:
    return VerlLogs(**logs).write_file_logger(folder / "log.jsonl")  # type: ignore[arg-type]


def traces(folder: Path) -> Path:
    for rank in range(2):
        for step in (1, 2, 3):
            trace = training_step(rank, 2, at_ms=100.0 * step, number=step)
            trace.write(folder / f"trace-{step}-rank{rank}.json.gz")
    return folder


NO_CAUSES = "cannot be told from this log"
ONE_TIMELINE = "whether tokens and active time are balanced between ranks cannot be known"

SOURCES = {
    "verl console, legacy names": Source(
        "verl",
        lambda folder: console(folder, is_v1=False),
        ("update_actor", "rollout", NO_CAUSES, ONE_TIMELINE),
    ),
    "verl file logger with a critic": Source(
        "verl",
        lambda folder: file_logger(folder, has_critic=True, save_every=2, test_every=3),
        ("critic update", "Checkpoints block training", NO_CAUSES),
    ),
    "verl asynchronous": Source(
        "verl", lambda folder: file_logger(folder, is_asynchronous=True), (NO_CAUSES,)
    ),
    "verl TensorBoard": Source(
        "verl", lambda folder: VerlLogs().write_tensorboard(folder / "events"), ("update_actor", NO_CAUSES)
    ),
    "a real TRL run's state": Source(
        "trl",
        lambda folder: TRL / "trainer_state.json",
        ("how it divides into stages is not known", NO_CAUSES, ONE_TIMELINE),
        ("update_actor, the training proper",),
    ),
    "a real TRL run's console": Source("trl", lambda folder: TRL / "console.log", (NO_CAUSES,)),
    "torch traces of two ranks": Source(
        "trace",
        traces,
        (
            "Divided by cause in profiled steps",
            "How many tokens each rank trained on",
            "Active time is balanced",
        ),
        (NO_CAUSES,),
    ),
    "timeline rows": Source(
        "rows", lambda folder: write_rows(colocated(4), folder / "rows.csv"), ("update_actor", "on 2 ranks")
    ),
    "timeline rows of separate roles": Source(
        "rows", lambda folder: write_rows(separate(4), folder / "rows.jsonl"), ("weight sync",)
    ),
}


@pytest.fixture(scope="module", params=SOURCES.items(), ids=SOURCES.keys())
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    _, source = request.param
    folder = tmp_path_factory.mktemp("imported")
    run_dir = folder / "run"
    assert main(["import", source.command, str(source.write(folder)), "--out", str(run_dir)]) == 0
    return source, run_dir


def test_every_command_that_reads_a_run_reads_it(
    imported: tuple[Source, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run_dir = imported
    for command in (["diagnose"], ["report", "--json"], ["explain"], ["watch", "--once"]):
        capsys.readouterr()
        assert main([command[0], str(run_dir), *command[1:]]) == 0, command
        assert capsys.readouterr().out.strip()


def test_diagnosis_explanation_and_watch_agree_on_the_stages(
    imported: tuple[Source, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run_dir = imported
    capsys.readouterr()
    assert main(["diagnose", str(run_dir), "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert main(["watch", str(run_dir), "--once", "--json"]) == 0
    snapshot = json.loads(capsys.readouterr().out)
    explained = {figure.key: figure.value for figure in explain(run_dir).figures}
    assert explained["step_s"] == pytest.approx(diagnosis["step_s"])
    for stage in diagnosis["stages"]:
        said = explained.get(f"stage_s/{stage['stage']}", 0.0)
        assert said == pytest.approx(stage["seconds"]) or stage["share"] < 0.01
    assert set(snapshot["stages"]) == {stage["stage"] for stage in diagnosis["stages"]}
    assert snapshot["status"] == "imported"
    total = sum(stage["seconds"] for stage in diagnosis["stages"]) + diagnosis["unaccounted_s"]
    assert total == pytest.approx(diagnosis["step_s"])


def test_the_explanation_says_what_is_known_and_what_cannot_be(imported: tuple[Source, Path]) -> None:
    source, run_dir = imported
    text = explain(run_dir).text
    for sentence in source.says:
        assert sentence in text, text
    for sentence in source.says_not:
        assert sentence not in text, text
    assert re.search("[\u4e00-\u9fff]", explain(run_dir, lang="zh", audience="manager").text)


def test_every_number_of_the_explanation_is_in_the_imported_records(imported: tuple[Source, Path]) -> None:
    _, run_dir = imported
    records = RawRun(run_dir).figures()
    for audience in AUDIENCES:
        for figure in explain(run_dir, audience=audience).figures:
            assert figure.value == pytest.approx(records[figure.key], rel=1e-6, abs=1e-12), figure.key


def test_the_report_is_written_in_both_languages(
    imported: tuple[Source, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run_dir = imported
    for lang in ("en", "zh"):
        assert main(["report", str(run_dir), "--lang", lang]) == 0
    assert list(run_dir.glob("*.html"))


def test_an_imported_run_has_ended_and_raises_no_alarm_for_what_its_log_leaves_out(
    imported: tuple[Source, Path],
) -> None:
    _, run_dir = imported
    follower = follow(run_dir)
    assert follower.has_ended
    assert not [alarm for alarm in alarms_of(follower) if alarm.name in ("unaccounted", "silent", "failed")]
