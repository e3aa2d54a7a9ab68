"""The doctor looks, measures and advises, without loading a model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_sections

from paceline.bench.ceilings import measure_ceilings
from paceline.cli.checks import FAIL, OK, WARN, Check
from paceline.cli.doctor import disk, examine, tokenizers_parallelism, versions
from paceline.cli.doctor_hardware import ceilings_check, debug_flags, device_line, interconnect
from paceline.config import load_config
from paceline.schedules import run_training
from paceline.telemetry.ceilings import Ceilings, store_ceilings
from paceline.telemetry.device.records import DeviceFigures
from paceline.telemetry.roofline import read_roofline

NAMED = ["model.path=org/model", "task.name=word_sorting"]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture(autouse=True)
def in_a_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_machine_alone_is_examined_without_a_recipe() -> None:
    checks = by_name(examine(None, []))
    wanted = {
        "python",
        "torch",
        "transformers",
        "cpu",
        "threads",
        "memory",
        "attention",
        "tokenizers",
        "disk space",
    }
    assert wanted <= set(checks) and "recipe" not in checks
    assert "bfloat16" in checks["cpu"].found and "MiB/s" in checks["disk speed"].found


def test_a_valid_recipe_gets_its_arithmetic() -> None:
    checks = by_name(examine(None, [*NAMED, "checkpoint.every=10"]))
    assert checks["recipe"].status == checks["checkpoint.every"].status == OK
    assert "128 samples and 1 updates per step" in checks["recipe"].found


def test_every_problem_of_a_recipe_is_a_failed_line_and_the_machine_is_still_examined() -> None:
    checks = by_name(examine(None, [*NAMED, "rollout.temperature=0", "rollout.top_p=0.8"]))
    assert checks["rollout.temperature"].status == checks["rollout.top_p"].status == FAIL
    assert checks["python"].status == OK


@pytest.mark.parametrize(
    ("overrides", "name", "status"),
    [
        (["run.num_steps=1000"], "checkpoint.every", WARN),
        (["run.num_steps=10"], "checkpoint.every", OK),
        (["run.num_steps=10", "checkpoint.every=11"], "checkpoint.every", WARN),
        (["checkpoint.every=1", "checkpoint.asynchronous=false"], "checkpoint.every", WARN),
        (["run.eval_every=1"], "run.eval_every", WARN),
        (["run.num_steps=100000"], "run.save_samples_every", WARN),
        (["task.reward_workers=100000"], "task.reward_workers", WARN),
        (["model.path=./not_there"], "model.path", FAIL),
        (["model.path=org/model"], "model.path", OK),
        (["task.name=null", "task.path=not_there.jsonl"], "task.path", FAIL),
    ],
)
def test_a_recipe_that_would_cost_time_or_fail_is_told_so(
    overrides: list[str], name: str, status: str
) -> None:
    check = by_name(examine(None, [*NAMED, *overrides]))[name]
    assert check.status == status
    assert check.advice or status == OK


def test_a_local_model_folder_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert by_name(examine(None, [*NAMED, f"model.path={folder}"]))["model.path"].status == FAIL
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "llama" in by_name(examine(None, [*NAMED, f"model.path={folder}"]))["model.path"].found


def test_a_reward_function_of_ones_own_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_the_doctor.py").write_text("def score(completion): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def check(name: str) -> Check:
        return by_name(examine(None, [*NAMED, f"task.reward=rewards_of_the_doctor:{name}"]))["task.reward"]

    assert check("score").status == OK
    missing = check("scor")
    assert missing.status == FAIL and "scor" in missing.found and missing.advice.endswith(":score")


def test_the_disk_probe_leaves_nothing_behind_and_takes_a_folder_that_does_not_exist_yet(
    tmp_path: Path,
) -> None:
    space, speed = disk(tmp_path / "runs/deep")
    assert "GiB free" in space.found and speed.status != FAIL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("setting", "status"), [("false", WARN), ("0", WARN), ("true", OK)])
def test_a_serial_tokenizer_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, setting: str, status: str
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", setting)
    assert tokenizers_parallelism().status == status


def test_flags_that_debugging_left_behind_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check.status for check in debug_flags()] == [OK]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    (check,) = debug_flags()
    assert (check.name, check.status) == ("CUDA_LAUNCH_BLOCKING", WARN)


CEILINGS = Ceilings(
    "a device",
    "2",
    {"bfloat16": 700.0},
    copy_gbs=4000.0,
    collective_backend="nccl",
    collective_latency_us=20.0,
    collective_gbs=300.0,
)


def test_the_interconnect_is_judged_by_what_was_measured() -> None:
    assert interconnect(CEILINGS, 8)[0].status == OK
    assert "20 µs latency, 300 GB/s" in interconnect(CEILINGS, 8)[0].found
    assert interconnect(replace(CEILINGS, collective_latency_us=500.0), 8)[0].status == WARN
    assert (interconnect(None, 8)[0].status, interconnect(None, 1)[0].status) == (WARN, OK)


def test_ceilings_that_were_not_measured_are_asked_for() -> None:
    assert ceilings_check(None).status == WARN and "--measure" in ceilings_check(None).advice
    assert "bfloat16 700" in ceilings_check(CEILINGS).found


def test_measured_ceilings_are_kept_and_runs_carry_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    device = torch.device("cpu")
    found = measure_ceilings(device, tmp_path, seconds=0.02)
    assert found.matmul_tflops["float32"] > 0 and found.copy_gbs and found.disk_write_gbs
    assert found.collective_backend == "gloo" and found.collective_latency_us and found.collective_gbs
    store_ceilings(found)
    checks = by_name(examine(None, []))
    assert checks["ceilings"].status == OK and "gloo" in checks["interconnect"].found
    sections = tiny_sections(tmp_path, run={"num_steps": 1}, task={"eval_size": 0})
    run_dir = run_training(load_config(sections=sections)).run_dir
    stages = {stage.stage: stage for stage in read_roofline(run_dir).stages}
    update = stages["update_actor"]
    assert read_roofline(run_dir).ceilings == found
    assert update.floor_share is not None and 0 < update.floor_share < 1
    assert update.bound in ("compute", "memory") and stages["rollout"].gbs


@pytest.mark.parametrize(
    ("overrides", "name", "status"),
    [
        (["telemetry.profile_every=1"], "telemetry.profile_every", WARN),
        (["telemetry.keep_traces=true"], "telemetry.keep_traces", WARN),
        (["telemetry.sample_every_s=0.01"], "telemetry.sample_every_s", WARN),
        (["telemetry.profile_every=50"], "telemetry", OK),
        (["train.gradient_checkpointing=all"], "rollout.keep_cache", WARN),
        (["train.gradient_checkpointing=all", "rollout.keep_cache=false"], "rollout.keep_cache", OK),
    ],
)
def test_measuring_and_caches_of_a_recipe_are_judged(overrides: list[str], name: str, status: str) -> None:
    assert by_name(examine(None, [*NAMED, *overrides]))[name].status == status


def test_a_device_that_is_in_use_is_told() -> None:
    busy = device_line("cuda:0 in use", DeviceFigures(utilization=0.9, power_w=650.0))
    assert busy.status == WARN and "90% of the time, 650 W" in busy.found
    assert device_line("cuda:0 in use", DeviceFigures()).status == OK


def test_a_library_outside_what_is_required_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.doctor.metadata.requires", lambda name: ["torch>=99", "numpy"])
    checks = by_name(versions())
    assert (checks["torch"].status, checks["numpy"].status) == (WARN, OK)
    assert "outside >=99" in checks["torch"].found
