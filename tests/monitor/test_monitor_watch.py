"""`paceline watch`: a snapshot, a run followed to its end, and the endpoint of a run that trains."""

import io
import json
import os
import re
import signal
import socket
import string
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from monitor_runs import GrowingRun
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from rich.console import Console
from tiny_runs import tiny_sections

from paceline.cli import main
from paceline.config import ConfigError, load_config
from paceline.monitor.following import follow
from paceline.monitor.panel import panel
from paceline.monitor.snapshot import take_snapshot
from paceline.monitor.words import ALARMS, PANEL
from paceline.schedules import run_training
from paceline.telemetry.run_process import STATUS_TEXTS

LONG_S = 120.0


def shown(run_dir: Path) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(panel(take_snapshot(follow(run_dir)), "the longest sample"))
    return console.export_text()


def test_the_panel_shows_what_a_person_looks_for(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "night-run")
    run.steps(1, 8, samples__overlong=1, mfu__step=0.375, tokens__effective_share=2.24)
    run.summary("running")
    text = shown(run.run_dir)
    for part in (
        "night-run · 2 ranks",
        "running",
        "step 8/20",
        "time left 0:12",
        "reward",
        "900 tokens/s",
        "MFU (step)        37.5%",
        "effective tokens  2.2 x",
        "1.00 GiB",
        "rollout            0.6 s  60.0%",
        "idle               0.1 s  10.0%",
        "bottleneck  the longest sample",
        "8 samples longer than the token budget",
    ):
        assert part in text, text


def test_a_snapshot_of_a_run_that_has_only_begun_shows_no_figures(tmp_path: Path) -> None:
    text = shown(GrowingRun(tmp_path / "r").run_dir)
    assert "starting" in text
    assert "step 0/20" in text
    assert "no alarms" in text


def test_once_prints_a_snapshot_and_as_json_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 3)
    run.summary("running")
    assert main(["watch", str(run.run_dir), "--once"]) == 0
    assert "step 3/20" in capsys.readouterr().out
    assert main(["watch", str(run.run_dir), "--once", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step"] == 3
    assert record["stages"]["rollout"] == pytest.approx(0.6)
    assert record["busiest_stage"] == "rollout"
    assert sum(record["stages"].values()) + record["unaccounted_s"] == pytest.approx(record["step_s"])


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--serve", "70000"], ["--lang", "fr"]])
def test_options_that_cannot_be_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    assert main(["watch", str(GrowingRun(tmp_path / "r").run_dir), *arguments]) == 2


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert main(["watch", str(tmp_path / "nowhere")]) == 2


def watching(run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "watch", str(run_dir), "--interval", "0.1", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_watching_follows_a_run_through_a_resume_to_its_end(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.step(1)
    run.summary("running")
    process = watching(run.run_dir, "--json")
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["step"] == 1
        run.step(2)
        assert json.loads(process.stdout.readline())["step"] == 2
        run.process()
        run.step(2, reward__mean=0.75)
        run.summary("completed")
        rest, errors = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    last = json.loads(rest.splitlines()[-1])
    assert process.returncode == 0, errors
    assert (last["status"], last["step"], last["reward"]) == ("completed", 2, [0.5, 0.75])


def test_a_finished_run_is_served_until_interrupted(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 2)
    run.summary("completed")
    process = watching(run.run_dir, "--serve", "0")
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        with urllib.request.urlopen(url, timeout=LONG_S) as answer:
            text = answer.read().decode()
        names = {family.name for family in text_string_to_metric_families(text)}
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    assert "paceline_rank_stage_seconds" in names


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_run_that_trains_serves_its_metrics_and_stops_with_the_run(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    sections = tiny_sections(tmp_path, run={"num_steps": 4}, telemetry={"metrics_port": port})
    scraped: list[str] = []
    finished = threading.Event()

    def scrape() -> None:
        while not finished.is_set():
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    scraped.append(answer.read().decode())
            except OSError:
                pass  # not yet, or no longer, there
            time.sleep(0.02)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        result = run_training(load_config(None, sections=sections))
    finally:
        finished.set()
        thread.join()
    assert scraped
    steps = [
        sample.value
        for text in scraped
        for family in text_string_to_metric_families(text)
        if family.name == "paceline_step"
        for sample in family.samples
    ]
    assert steps == sorted(steps)
    assert steps[-1] >= 1
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)
    assert os.path.isdir(result.run_dir)


def test_a_run_whose_port_is_taken_is_refused_before_it_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sections = tiny_sections(tmp_path, telemetry={"metrics_port": port})
        with pytest.raises(ConfigError) as refused:
            run_training(load_config(None, sections=sections))
    assert refused.value.key == "telemetry.metrics_port"
    assert not (tmp_path / "runs" / "r" / "metrics.jsonl").exists()


def test_the_panel_is_chinese_throughout_and_says_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 8, samples__overlong=1)
    run.summary("running")
    assert main(["watch", str(run.run_dir), "--once", "--lang", "zh"]) == 0
    chinese = capsys.readouterr().out
    assert main(["watch", str(run.run_dir), "--once"]) == 0
    english = capsys.readouterr().out
    for part in (
        "2 个进程",
        "进行中",
        "第 8/20 步",
        "生成（rollout）",
        "策略更新",
        "瓶颈",
        "奖励",
        "样本长于词元预算",
    ):
        assert part in chinese, chinese
    for word in ("step", "idle", "bottleneck", "time left", "alarms", "throughput"):
        assert word not in chinese, chinese
    numbers = re.compile(r"\d[\d.,:%]*")
    assert sorted(numbers.findall(chinese)) == sorted(numbers.findall(english))


def test_every_text_has_the_same_values_in_both_languages() -> None:
    for name, (english, chinese) in {**ALARMS, **PANEL, **STATUS_TEXTS}.items():
        fields = [
            {field for _, field, _, _ in string.Formatter().parse(text) if field}
            for text in (english, chinese)
        ]
        if name != "mfu":  # the Chinese reason is one sentence, the English one is telemetry's
            assert fields[0] == fields[1], name
        assert english and chinese
