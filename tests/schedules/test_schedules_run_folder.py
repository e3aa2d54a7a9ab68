"""Who writes a run's folder, and what a start that came to nothing leaves there."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tiny_runs import tiny_sections

from paceline import train
from paceline.config import ConfigError, load_config
from paceline.files import write_whole
from paceline.monitor.alarms import alarms_of
from paceline.monitor.following import follow
from paceline.report import report_figures
from paceline.schedules import run_folder
from paceline.schedules.run_folder import RunFolder, open_run_folder
from paceline.schedules.training import NothingTrainedError
from paceline.telemetry.run_process import RunProcess, read_process, this_process, write_process


@pytest.fixture
def other_process() -> Iterator[int]:
    """A process that lives as long as the test."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child.pid
    child.kill()
    child.communicate()


def test_a_refused_first_start_says_so_and_leaves_the_folder_free(tmp_path: Path) -> None:
    sections = tiny_sections(tmp_path)
    refused = {**sections, "model": {"path": str(tmp_path / "nowhere")}}
    with pytest.raises(ConfigError, match="nowhere"):
        train(**refused)
    run_dir = tmp_path / "runs" / "r"
    found = follow(run_dir)
    assert (found.status, found.has_ended) == ("refused", True)
    assert [(alarm.name, "nowhere" in alarm.text) for alarm in alarms_of(found)] == [("refused", True)]
    assert report_figures(run_dir)["status"] == "refused"

    sections["run"] |= {"resume": "never", "num_steps": 1}
    run = train(**sections)  # what never began is no run that would have to be resumed
    assert run.figures()["status"] == "completed"
    assert follow(run_dir).status == "completed"
    process = read_process(run_dir)
    assert process is not None and process.outcome == "ended"


def test_a_second_run_into_a_folder_that_is_being_written_is_refused(
    tmp_path: Path, other_process: int
) -> None:
    sections = tiny_sections(tmp_path)
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    began = psutil.Process(other_process).create_time()
    write_process(run_dir, replace(this_process(), pid=other_process, started_unix_s=began))
    with pytest.raises(ConfigError, match=f"process {other_process} is writing") as refused:
        train(**sections)
    assert (refused.value.key, refused.value.nearest) == ("run.name", "r-2")
    process = read_process(run_dir)
    assert process is not None and process.pid == other_process


@pytest.mark.parametrize(
    "error", [RuntimeError("the loss diverged"), ConfigError("model.path", "x", "is no model")]
)
def test_an_error_is_raised_on_where_the_disk_is_too_full_to_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def write_until_full(run_dir: Path, process: RunProcess) -> None:
        if process.outcome:
            raise OSError(28, "No space left on device")
        write_process(run_dir, process)

    monkeypatch.setattr(run_folder, "write_process", write_until_full)
    with pytest.raises(type(error)) as raised, RunFolder(tmp_path, resumes=False).process_recorded():
        raise error
    assert raised.value is error
    assert raised.value.__notes__ == ["process.json could not say so: [Errno 28] No space left on device"]


def test_a_run_fails_with_its_own_error_where_its_summary_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_until_full(path: Path, text: str) -> None:
        if '"status": "failed"' in text:
            raise OSError(28, "No space left on device")
        write_whole(path, text)

    monkeypatch.setattr(run_folder, "write_whole", write_until_full)
    every_sample_masked = {"algorithm": {"mask_truncated": True}, "rollout": {"max_new_tokens": 1}}
    with pytest.raises(NothingTrainedError) as raised:
        train(**tiny_sections(tmp_path, run={"num_steps": 1}, **every_sample_masked))
    assert raised.value.__notes__ == ["summary.json could not say so: [Errno 28] No space left on device"]
    process = read_process(tmp_path / "runs" / "r")
    assert process is not None and process.outcome == "failed"


def test_of_two_starts_at_the_same_instant_the_second_is_refused(tmp_path: Path, other_process: int) -> None:
    config = load_config(None, sections=tiny_sections(tmp_path))
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    found: list[object] = []

    def start() -> None:
        try:
            found.append(open_run_folder(config))
        except ConfigError as error:
            found.append(str(error))

    second = threading.Thread(target=start)
    first = os.open(run_dir, os.O_RDONLY)  # the other start is looking at the folder
    fcntl.flock(first, fcntl.LOCK_EX)
    second.start()
    second.join(0.5)
    began = psutil.Process(other_process).create_time()
    write_process(run_dir, replace(this_process(), pid=other_process, started_unix_s=began))
    os.close(first)
    second.join()
    assert f"process {other_process} is writing" in str(found[0])


def test_a_folder_is_a_start_s_own_as_soon_as_it_is_opened(tmp_path: Path) -> None:
    config = load_config(None, sections=tiny_sections(tmp_path))
    folder = open_run_folder(config)
    assert read_process(folder.path) == this_process()
    nowhere = {**tiny_sections(tmp_path)["run"], "name": "nowhere", "resume": "must"}
    with pytest.raises(ConfigError, match="holds no run to resume"):
        open_run_folder(load_config(None, sections=tiny_sections(tmp_path, run=nowhere)))
    assert not (tmp_path / "runs" / "nowhere").exists()


@pytest.mark.parametrize(("section", "key"), [("run", "dir"), ("rollout", "record")])
def test_a_folder_that_cannot_be_made_is_refused_by_its_setting(
    tmp_path: Path, section: str, key: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError) as refused:
        train(**tiny_sections(tmp_path, **{section: {key: str(tmp_path / "file")}}))
    assert refused.value.key == f"{section}.{key}"
