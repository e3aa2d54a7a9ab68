"""Ranks started by one command: exit codes and causes through the launcher, stages of killed ranks, stop requests."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import Config, ConfigError
from paceline.config.schema import ClusterSection, RunSection
from paceline.launch.devices import check_device_count, num_devices
from paceline.launch.dispatch import run_or_launch
from paceline.launch.placement import LAUNCHER_VARIABLE, REPORTS_VARIABLE, find_placement
from paceline.launch.ranks import RankFailedError, run_on_ranks
from paceline.launch.reports import read_reports, write_report
from paceline.launch.stage_board import open_board, read_stage

HERE = Path(__file__).parent


def run_script(monkeypatch: pytest.MonkeyPatch, script: str, num_ranks: int = 3) -> None:
    """Runs `script` from rank_scripts.py on every rank in place of a command of paceline."""
    config = Config(cluster=ClusterSection(num_devices=num_ranks, device="cpu"))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr("paceline.launch.ranks._MODULE", "rank_scripts")
    run_on_ranks(config, (script,))


def test_ranks_that_finish_raise_nothing(monkeypatch):
    run_script(monkeypatch, "finish")


def test_the_rank_that_failed_first_and_its_cause_are_named(monkeypatch):
    with pytest.raises(
        RankFailedError, match=r"rank 1: KeyError: 'the cause' \(caused by OSError: the disk\)"
    ) as caught:
        run_script(monkeypatch, "fail_on_rank_1")
    assert "in fail_on_rank_1" in caught.value.__notes__[0]


def test_a_killed_rank_is_named_with_its_signal_and_stage(monkeypatch):
    with pytest.raises(RankFailedError, match=r"rank 2: ended by SIGKILL in stage rollout"):
        run_script(monkeypatch, "kill_rank_2_while_others_wait")


def test_a_refusal_by_the_ranks_is_raised_once_as_the_refusal_it_is(monkeypatch):
    with pytest.raises(ConfigError) as caught:
        run_script(monkeypatch, "refuse")
    [problem] = caught.value.problems
    assert problem.line == "train.lr = -1.0: must be positive (nearest: 0.0)"


def test_sigterm_to_the_command_reaches_every_rank_once(tmp_path):
    code = (
        "import sys; from pathlib import Path; from paceline.launch import ranks\n"
        "from paceline.config import Config; from paceline.config.schema import ClusterSection\n"
        "ranks._MODULE = 'rank_scripts'\n"
        "ranks.run_on_ranks(Config(cluster=ClusterSection(num_devices=2, device='cpu')), ('wait_for_sigterm',))\n"
        "print('done')\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    assert process.stdout is not None
    ready = [process.stdout.readline() for _ in range(2)]
    assert ready == ["ready\n", "ready\n"]
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert sorted(rest.split("\n")) == ["", "asked [15]", "asked [15]", "done"]
    assert process.returncode == 0


def test_a_rank_whose_launcher_died_before_it_could_join_ends():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = (
        "from paceline.launch.process_group import joined_ranks\n"
        "from paceline.config import Config; from paceline.config.schema import ClusterSection\n"
        "with joined_ranks(Config(cluster=ClusterSection(num_devices=2, device='cpu'))): pass\n"
    )
    nobody = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **nobody}
    launcher = {REPORTS_VARIABLE: "unused", LAUNCHER_VARIABLE: str(gone.pid)}
    rank = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | place | launcher, stderr=subprocess.PIPE
    )
    try:
        rank.communicate(timeout=120)  # the rank itself would look for the others for half an hour
    finally:
        rank.kill()
    assert rank.returncode == -signal.SIGTERM


def test_more_devices_than_there_are_is_refused_before_anything_waits(monkeypatch):
    with pytest.raises(ConfigError, match="no cuda device"):
        run_on_ranks(Config(cluster=ClusterSection(num_devices=2, device="cuda")))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match=r"cluster\.num_devices = 2: this machine shows 1 cuda device to torch"
    ) as caught:
        check_device_count("cuda", 2)
    assert caught.value.nearest == "1"
    assert num_devices("cpu") == 1
    check_device_count("cpu", 8)


def test_torchrun_finds_a_ranks_error_where_it_looks_for_one(tmp_path):
    placement = find_placement(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    )
    assert placement is not None
    path = tmp_path / "error.json"
    write_report(RuntimeError("no space"), placement, {"TORCHELASTIC_ERROR_FILE": str(path)})
    assert "rank 3: RuntimeError: no space" in path.read_text()
    assert read_reports(tmp_path) == []


def test_a_rank_without_our_launcher_shows_no_stage(tmp_path):
    assert open_board(None, {}) is None
    assert read_stage(tmp_path, 0) is None


def test_only_a_process_nobody_placed_starts_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr("paceline.launch.ranks._MODULE", "rank_scripts")
    config = Config(
        run=RunSection(dir=str(tmp_path), name="r"), cluster=ClusterSection(num_devices=2, device="cpu")
    )
    ran_here: list[Config] = []

    def run_here(config: Config) -> Path:
        ran_here.append(config)
        return tmp_path

    assert run_or_launch(config, "finish", run_here) == tmp_path / "r" and ran_here == []
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run_or_launch(config, "finish", run_here) == tmp_path and ran_here == [config]
