"""Known slow-downs planted in small real runs: each is named first, with the size that was planted."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from planted_rewards import SLEEP_S
from planted_runs import (
    BASE,
    Clock,
    rollout_and_shadow,
    train,
    update_and_shadow,
    write_prompts,
    write_recipe,
)
from simulated_device import SimulatedDevice

import paceline.checkpoint.writing
import paceline.engine.model_engine
import paceline.schedules.sync
from paceline.data.loader import PromptLoader
from paceline.diagnosis import Diagnosis, diagnose
from paceline.diagnosis.text import diagnosis_text
from paceline.model.attention import PaddedPlan
from paceline.rollout.native.scheduler import RunningSample

TESTS = Path(__file__).parents[1]
NUM_SAMPLES = BASE["batch"]["num_prompts"] * BASE["batch"]["num_samples"]


@pytest.fixture(scope="module", autouse=True)
def rewards_are_importable() -> Iterator[None]:
    paths = [str(TESTS / "model"), str(TESTS / "diagnosis"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def uneven(folder: Path) -> Path:
    """Prompts of 1 to 24 words."""
    return write_prompts(folder / "uneven.jsonl", 240, range(1, 25))


@contextmanager
def steady_clock() -> Iterator[Callable[[float], None]]:
    """A clock that another process on this machine cannot move; gives how time passes by it.

    PACELINE_REAL_CLOCK=1 keeps the machine's clock, for a quiet machine.
    """
    if os.environ.get("PACELINE_REAL_CLOCK") == "1":
        yield time.sleep
        return
    with SimulatedDevice().keeps_time() as sleep:
        yield sleep


@pytest.fixture
def sleep() -> Iterator[Callable[[float], None]]:
    with steady_clock() as sleep:
        yield sleep


@pytest.fixture(scope="module")
def healthy(folder: Path) -> Diagnosis:
    """The run without anything planted."""
    with steady_clock():
        return diagnose(train(folder, "healthy"))


def named_first(run_dir: Path, id: str, planted_s: float, least_s: float = 0.08) -> Diagnosis:
    """Asserts that a run's first finding is `id`, with the planted seconds within a fifth."""
    found = diagnose(run_dir)
    text = diagnosis_text(found)
    assert found.findings and found.findings[0].id == id, text
    first = found.findings[0]
    assert abs(first.seconds - planted_s) <= 0.2 * planted_s, f"planted {planted_s:.3f} s\n{text}"
    assert planted_s >= least_s, f"planted too little to be told from noise: {planted_s:.3f} s"
    return found


def test_a_healthy_run_gets_no_alarm(healthy):
    assert healthy.findings == (), diagnosis_text(healthy)
    assert healthy.num_warmup_steps == 1 and healthy.num_steps == 4


def test_a_slow_reward(folder):
    run_dir = train(folder, "reward", task={"reward": "planted_rewards:slow_even_share"})
    found = named_first(run_dir, "slow_reward", NUM_SAMPLES * SLEEP_S)
    assert any(wait.kind == "reward" for wait in found.waits)


def test_a_slow_disk(folder, monkeypatch):
    clock = Clock().follow(monkeypatch)
    fsync = paceline.checkpoint.writing.fsync

    def slow(path: Path) -> None:
        clock.nap(0.1)
        fsync(path)

    monkeypatch.setattr(paceline.checkpoint.writing, "fsync", slow)
    run_dir = train(folder, "disk", checkpoint={"every": 1, "keep": 1, "asynchronous": False})
    found = named_first(run_dir, "slow_disk", clock.per_step())
    assert {switch.feature for switch in found.switches} >= {"async_checkpoint", "checkpoint_interval"}


@pytest.mark.usefixtures("sleep")
def test_tiny_micro_batches(folder, monkeypatch):
    clock, healthy = update_and_shadow(monkeypatch, token_budget=8192)
    prompts = write_prompts(folder / "mixed.jsonl", 240, range(1, 91, 8))
    small = {"token_budget": 24, "overlong": "own_micro_batch", "share_prefixes": "off", "num_samples": 6}
    run_dir = train(folder, "tiny", task={"path": str(prompts)}, batch=small, rollout={"max_new_tokens": 12})
    found = named_first(run_dir, "small_micro_batches", clock.per_step() - healthy.per_step())
    assert found.switches[0].feature == "dynamic_batch"


@pytest.mark.usefixtures("sleep")
def test_heavy_padding(folder, monkeypatch):
    clock, healthy = update_and_shadow(monkeypatch, pad_length=None)
    run_dir = train(folder, "padding", batch={"layout": "padded", "pad_length": 128})
    found = named_first(run_dir, "padding", clock.per_step() - healthy.per_step())
    assert found.switches[0].feature == "packing"


def test_a_long_tail(folder, monkeypatch, sleep):
    clock = Clock(sleep).follow(monkeypatch)
    append = RunningSample.append
    short_ended = [0.0]
    longest: dict[int, tuple[int, int]] = {}

    def ends_early(sample, *args):
        reason = append(sample, *args)
        own = (sample.request_id, sample.sample_index)
        if longest.setdefault(clock.step, own) != own:
            short_ended[0] = time.perf_counter()
            return reason or ("stop" if len(sample.tokens) == 8 else None)
        if len(sample.tokens) < sample.max_new_tokens:
            return None
        clock.seconds[clock.step] += time.perf_counter() - short_ended[0]
        return "length"

    monkeypatch.setattr(RunningSample, "append", ends_early)
    run_dir = train(folder, "tail", rollout={"max_new_tokens": 120})
    named_first(run_dir, "long_tail", clock.per_step())


def test_a_host_sync_in_the_loop(folder, monkeypatch, sleep):
    clock = Clock(sleep).follow(monkeypatch)
    build = paceline.engine.model_engine.build_micro_batch

    def slow(*args):
        clock.nap(0.1)
        return build(*args)

    monkeypatch.setattr(paceline.engine.model_engine, "build_micro_batch", slow)
    run_dir = train(folder, "host", batch={"token_budget": 1024})
    named_first(run_dir, "host_sync", clock.per_step())


def test_a_slow_loader(folder, monkeypatch, sleep):
    clock = Clock(sleep).follow(monkeypatch)
    next_batch = PromptLoader.next_batch

    def slow(loader):
        clock.nap(0.4)
        return next_batch(loader)

    monkeypatch.setattr(PromptLoader, "next_batch", slow)
    named_first(train(folder, "loader"), "slow_loader", clock.per_step())


def test_recompilation_on_new_shapes(folder, monkeypatch, sleep, uneven):
    clock = Clock(sleep).follow(monkeypatch)
    attend = PaddedPlan.attend
    planned = set()

    def plans(plan, query, *args):
        if query.shape not in planned:
            planned.add(query.shape)
            clock.nap(0.25)
        return attend(plan, query, *args)

    monkeypatch.setattr(PaddedPlan, "attend", plans)
    run_dir = train(
        folder,
        "shapes",
        task={"path": str(uneven)},
        batch={"layout": "padded", "pad_rows": 16, "token_budget": 1024},
    )
    named_first(run_dir, "new_shapes", clock.per_step())


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    """The folder of runs on two gloo ranks, one after the other in the same two processes."""
    ports = []
    for name in ("slow_rank", "slow_link"):
        write_recipe(folder, name, cluster={"num_devices": 2, "device": "cpu"}, task={"reward_workers": 2})
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(f"{name}={free.getsockname()[1]}")
    script = [sys.executable, str(TESTS / "diagnosis" / "planted_ranks.py"), str(folder), *ports]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    started = []
    for rank in ("0", "1"):
        environment = os.environ | world | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    return folder


def planted_on(folder: Path, name: str, rank: int) -> float:
    return json.loads((folder / f"{name}.rank{rank}.json").read_text())["per_step"]


def test_one_slow_rank(two_ranks):
    found = named_first(two_ranks / "runs" / "slow_rank", "slow_rank", planted_on(two_ranks, "slow_rank", 1))
    assert found.findings[0].values["rank"] == 1


def test_a_throttled_link(two_ranks):
    named_first(two_ranks / "runs" / "slow_link", "slow_link", planted_on(two_ranks, "slow_link", 0))


def test_a_redundant_logprob_pass(folder, monkeypatch, sleep):
    clock = Clock(sleep).follow(monkeypatch).around(monkeypatch, paceline.schedules.sync, "with_old_logprobs")
    prompts = write_prompts(folder / "long.jsonl", 240, [60])
    run_dir = train(
        folder,
        "logprob",
        task={"path": str(prompts)},
        algorithm={"old_logprob": "recompute"},
        batch={"num_prompts": 48, "num_samples": 2},
        rollout={"max_new_tokens": 6},
    )
    found = named_first(run_dir, "redundant_logprob", clock.per_step(), least_s=0.0)
    assert any(switch.keys == {"algorithm.old_logprob": "auto"} for switch in found.switches)


@pytest.mark.usefixtures("sleep")
def test_a_full_cache_with_preemption(folder, monkeypatch):
    clock, roomy = rollout_and_shadow(monkeypatch)
    run_dir = train(
        folder,
        "cache",
        task={"path": str(write_prompts(folder / "middle.jsonl", 240, [20]))},
        rollout={"max_new_tokens": 90, "cache": "paged", "kv_cache_gb": 0.00018, "ignore_eos": True},
        batch={"num_prompts": 4, "num_samples": 4},
    )
    found = named_first(run_dir, "preemption", clock.per_step() - roomy.per_step())
    assert found.switches[0].feature == "kv_cache"
