"""A run whose process is gone is told from one that goes on, and a refused start from one that is starting."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.telemetry.run_process import (
    RunProcess,
    read_process,
    run_status,
    this_process,
    write_process,
)


@pytest.fixture(scope="module")
def killed() -> RunProcess:
    """A process that was killed and told nothing."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = replace(this_process(), pid=child.pid)
    child.kill()
    child.communicate()
    return process


def test_a_process_comes_back_from_its_file_as_it_was_written(tmp_path: Path) -> None:
    process = replace(this_process(), outcome="refused", message="model.path = 'x': 没有")
    write_process(tmp_path, process)
    assert read_process(tmp_path) == process
    assert read_process(tmp_path / "elsewhere") is None


def test_a_damaged_file_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "process.json").write_text('{"v": 1, "host": "x"')
    assert read_process(tmp_path) is None
    (tmp_path / "process.json").write_text('{"v": 1, "host": "x"}')
    assert read_process(tmp_path) is None


def test_a_living_process_is_not_gone_and_a_killed_one_is(killed: RunProcess) -> None:
    assert this_process().is_gone is False
    assert killed.is_gone is True


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    assert replace(this_process(), started_unix_s=1000.0).is_gone is True


def test_of_another_machine_it_is_not_known(killed: RunProcess) -> None:
    assert replace(killed, host="elsewhere").is_gone is None


@pytest.mark.parametrize(
    ("written", "begun_anew", "status"),
    [
        ("running", False, "died"),
        ("", True, "died"),
        ("stopped", True, "died"),
        ("completed", False, "completed"),
    ],
)
def test_a_killed_process_leaves_a_run_that_died_unless_it_had_ended(
    killed: RunProcess, written: str, begun_anew: bool, status: str
) -> None:
    assert run_status(written, killed, begun_anew=begun_anew) == status


@pytest.mark.parametrize("process", [None, this_process(), RunProcess("elsewhere", os.getpid(), 0.0)])
def test_what_lives_or_cannot_be_asked_is_taken_at_its_word(process: RunProcess | None) -> None:
    assert run_status("running", process) == "running"
    assert run_status("", process) == "starting"
    assert run_status("stopped", process, begun_anew=True) == "starting"


def test_a_refused_start_is_refused_and_a_refused_attempt_to_go_on_changes_nothing() -> None:
    refused = replace(this_process(), outcome="refused")
    assert run_status("", refused, begun_anew=True) == "refused"
    assert run_status("completed", refused, begun_anew=True) == "completed"
    assert run_status("running", refused, begun_anew=True) == "died"
