"""Whole runs on several ranks through the command line: the same numbers as one rank, and failures that say who."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import ROLLOUT_CLOCKS, tiny_sections

from paceline.cli import main
from paceline.config import dump_config, load_config
from paceline.schedules import run_training
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import read_ledger, summarise

TESTS = Path(__file__).parents[1]
NOT_COMPARED = (
    "time/",
    "throughput/",
    "memory/",
    "tflops/",
    "mfu/",
    "checkpoint/",
    "balance/",
    *ROLLOUT_CLOCKS,
)
# what depends on how samples are laid out and divided, and is the same in sum only per layout
LAYOUT = (
    "micro_batches",
    "tokens/laid_out",
    "tokens/padding",
    "tokens/effective_share",
    "batch/",
    "rollout/mean_running",
    "rollout/cache_bytes",
)

# eps of the gradients' size: Adam's first step is else the sign of the gradient, and signs of zeros are noise
TRAIN = {"lr": 1e-3, "eps": 1e-3}


def recipe(tmp_path: Path, name: str, **changes) -> Path:
    changes["run"] = {"name": name, "num_steps": 2, **changes.get("run", {})}
    changes["train"] = {**TRAIN, **changes.get("train", {})}
    path = tmp_path / f"{name}.yaml"
    path.write_text(dump_config(load_config(None, sections=tiny_sections(tmp_path, **changes))))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline", "train", *map(str, arguments)]


def environment() -> dict[str, str]:
    paths = [str(TESTS / "model"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command on two ranks that somebody else starts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *command(*arguments)[1:]],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=150,
        check=False,
    )


def compared(run_dir: Path) -> dict[int, dict[str, float]]:
    return {
        record.step: {
            name: value
            for name, value in record.metrics.items()
            if not name.startswith(NOT_COMPARED) and not name.startswith(LAYOUT)
        }
        for record in read_metrics(run_dir)
    }


def samples(run_dir: Path, step: int) -> list[tuple[object, ...]]:
    lines = (run_dir / "samples" / f"step{step}.jsonl").read_text().splitlines()
    keys = ("prompt_id", "sample_index", "completion", "seed", "outcome", "score")
    return [tuple(json.loads(line)[key] for key in keys) for line in lines]


@pytest.fixture(scope="module", autouse=True)
def rewards_are_importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        yield


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of the same run on one rank and, through the command under torchrun, on two."""
    folder = tmp_path_factory.mktemp("ranks")
    sections = {"algorithm": {"kl_coefficient": 0.05}, "task": {"eval_size": 7}}
    one = run_training(load_config(recipe(folder, "one", **sections)))
    done = torchrun(recipe(folder, "two", **sections), "cluster.num_devices=2", "cluster.device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run: ") == 1 and done.stdout.count("step 2/2") == 1
    return one.run_dir, folder / "runs" / "two"


def test_two_ranks_have_the_samples_and_every_metric_of_one(one_and_two):
    one, two = one_and_two
    for step in (1, 2):
        assert samples(two, step) == samples(one, step)
    expected, found = compared(one), compared(two)
    assert list(found) == list(expected) == [0, 1, 2]
    for step, metrics in expected.items():
        assert set(metrics) <= set(found[step])
        for name, value in metrics.items():
            if name == "rollout/prefill_tokens":
                continue  # a prompt that two ranks sample is computed by both
            assert found[step][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)


def test_each_held_out_prompt_is_scored_once_whatever_the_ranks(one_and_two):
    for run_dir in one_and_two:
        assert [r.metrics["eval/completions"] for r in read_metrics(run_dir) if r.step != 1] == [7, 7]


def test_every_rank_accounts_for_all_its_time_and_shows_what_it_waited(one_and_two):
    two = one_and_two[1]
    ledgers = read_ledger(two)
    assert [ledger.rank for ledger in ledgers] == [0, 1]
    for ledger in ledgers:
        assert "idle" in summarise(ledger)["stages"]
        for section in ledger.steps():
            covered = sum(stage.self_s for stage in section.stages.values())
            assert covered + section.unaccounted_s == pytest.approx(section.wall_s)
        waits = [span for process in ledger.processes for span in process.spans if span.stage == "idle"]
        assert waits and {span.cause for span in waits} == {"queue", "communication"}
    tokens = [sum(s.stages["update_actor"].tokens for s in ledger.steps()) for ledger in ledgers]
    for record in [record for record in read_metrics(two) if record.step > 0]:
        metrics = record.metrics
        total = metrics["tokens/prompt"] + metrics["tokens/response"]
        steps = [ledger.steps()[record.step - 1] for ledger in ledgers]
        wall = sum(step.wall_s for step in steps) / 2
        assert metrics["throughput/tokens_per_s"] == pytest.approx(int(total) / wall)
        assert metrics["throughput/tokens_per_s_per_device"] == pytest.approx(int(total) / wall / 2)
        shares = [step.stages["update_actor"].tokens for step in steps]
        assert metrics["balance/tokens_max_over_mean"] == pytest.approx(2 * max(shares) / sum(shares))
        assert metrics["tokens/laid_out"] == sum(shares)
        assert 1.0 <= metrics["balance/busy_max_over_mean"] < 2.0
    assert all(tokens)


def test_one_rank_alone_waits_for_nobody_and_has_no_balance(one_and_two):
    one = one_and_two[0]
    (ledger,) = read_ledger(one)
    assert "idle" not in summarise(ledger)["stages"]
    assert not any(name.startswith("balance/") for record in read_metrics(one) for name in record.metrics)


def test_ranks_that_cannot_be_divided_as_asked_are_refused_before_any_starts(tmp_path, capsys):
    assert (
        main(["train", str(recipe(tmp_path, "r")), "cluster.num_devices=3", "cluster.tensor_parallel_size=2"])
        == 2
    )
    assert "cluster.tensor_parallel_size = 2: must divide" in capsys.readouterr().err


def test_a_rank_that_is_killed_ends_the_run_with_its_number_its_stage_and_1(tmp_path):
    arguments = [recipe(tmp_path, "r", run={"num_steps": 500}), "cluster.num_devices=2", "cluster.device=cpu"]
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for_step(tmp_path / "runs" / "r", 2)
    os.kill(rank_pid(process.pid, 1), signal.SIGKILL)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("failed: RankFailedError: rank 1: ended by SIGKILL in stage ")
    assert time.monotonic() - began < 40


def test_sigterm_saves_on_all_ranks_and_the_run_goes_on_where_it_was_on_another_number(tmp_path):
    path = recipe(tmp_path, "r", run={"num_steps": 400})
    process = subprocess.Popen(
        command(path, "cluster.num_devices=2", "cluster.device=cpu"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    folder = tmp_path / "runs" / "r"
    wait_for_step(folder, 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    summary = json.loads((folder / "summary.json").read_text())
    stopped_at = summary["num_steps"]
    assert summary["status"] == "stopped" and stopped_at >= 2
    assert (folder / "checkpoints" / f"step_{stopped_at}" / "COMPLETE").exists()
    resumed = run_training(load_config(path, [f"run.num_steps={stopped_at + 2}"]))
    assert resumed.summary["status"] == "completed"
    whole = run_training(load_config(path, ["run.name=whole", f"run.num_steps={stopped_at + 2}"]))
    expected, found = compared(whole.run_dir), compared(resumed.run_dir)
    assert list(found) == list(expected)
    for step in (1, stopped_at + 1, stopped_at + 2):
        for name in ("loss/policy", "grad_norm", "reward/mean", "lr"):
            assert math.isclose(found[step][name], expected[step][name], rel_tol=1e-4, abs_tol=1e-6), (
                step,
                name,
            )


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and any(r.step >= step for r in read_metrics(run_dir)):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


def rank_pid(launcher: int, rank: int) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status, variables = (path / "stat").read_text(), (path / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is not ours
            continue
        if int(status.rpartition(")")[2].split()[1]) == launcher and f"RANK={rank}".encode() in variables:
            return int(path.name)
    raise AssertionError(f"rank {rank} of {launcher} is not there")
