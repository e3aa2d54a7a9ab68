"""Who writes a run's folder, and what a start that came to nothing leaves there."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tiny_runs import tiny_sections

from paceline import train
from paceline.config import ConfigError
from paceline.monitor.alarms import alarms_of
from paceline.monitor.following import follow
from paceline.report import report_figures
from paceline.telemetry.run_process import read_process, this_process, write_process


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
