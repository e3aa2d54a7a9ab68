"""Rollout engines in the run's estimate: what each holds on the trainer's device, and when."""

import pytest

from paceline.bench.shapes import shape_config
from paceline.cli.app import main
from paceline.config import Config, load_config
from paceline.planner.fit import usable_bytes, ways_to_fit
from paceline.planner.memory import DEVICE_CONTEXT_BYTES, GIB, MemoryEstimate
from paceline.planner.memory_table import memory_table
from paceline.planner.model_shape import MemoryShape
from paceline.planner.run_facts import RunFacts
from paceline.planner.run_memory import estimate_run, kept_between_rollouts

SHAPE = MemoryShape.from_hf_config(shape_config("qwen3-1.7b").to_dict())
DEVICE = 141e9
FACTS = RunFacts(SHAPE, 2, 512, device_bytes=DEVICE)
NATIVE_PARTS = ("KV cache", "prefill and decoding", "weights of rollout replicas")


def config(**rollout: object) -> Config:
    sections = {
        "model": {"path": "some/model"},
        "task": {"path": "prompts.jsonl"},
        "batch": {"token_budget": 16384},
        "rollout": {"max_new_tokens": 512, **rollout},
        "cluster": {"device": "cuda"},
    }
    return load_config(None, [], sections=sections)


def vllm(**settings: object) -> dict[str, object]:
    return {"engine": "vllm", "vllm": settings}


def estimate(**rollout: object) -> MemoryEstimate:
    return estimate_run(config(**rollout), FACTS)


def training(found: MemoryEstimate) -> float:
    return found.of_phase("actor", "layers")


def sampling(found: MemoryEstimate) -> float:
    return found.of_phase("actor", "rollout")


ELSEWHERE = estimate(engine="vllm", replicas={"devices": [1]})
"""The trainer's own, and no engine beside it."""

SHARE = 0.5 * DEVICE


@pytest.mark.parametrize("mode", ["colocated", "child", "server"])
def test_a_sleeping_vllm_has_its_share_of_the_device_while_it_samples(mode):
    found = estimate(**vllm(mode=mode))
    context = 0 if mode == "colocated" else DEVICE_CONTEXT_BYTES  # a process's, asleep or not
    assert sampling(found) == pytest.approx(sampling(ELSEWHERE) + SHARE + context)
    assert training(found) == pytest.approx(training(ELSEWHERE) + context)
    assert not any(found.part(name) for name in NATIVE_PARTS)


def test_a_vllm_that_never_sleeps_has_its_share_in_every_phase():
    found = estimate(**vllm(mode="colocated", sleep_level=0))
    assert training(found) == pytest.approx(training(ELSEWHERE) + SHARE)
    assert sampling(found) == pytest.approx(sampling(ELSEWHERE) + SHARE)


def test_several_vllms_on_the_trainers_device_have_a_share_each():
    found = estimate(num_replicas=2, **vllm(gpu_memory_utilization=0.3))
    assert found.part("vLLM's share of the device") == pytest.approx(0.6 * DEVICE)


SERVERS = [
    {"engine": "vllm", "vllm": {"mode": "server", "addresses": ["http://h:1"]}},
    {"engine": "sglang", "sglang": {"addresses": ["http://h:1"]}},
    {"engine": "vllm", "replicas": {"devices": [1]}},
    {"num_replicas": 2, "replicas": {"devices": [1, 2]}},
]


@pytest.mark.parametrize("rollout", SERVERS, ids=["vllm-server", "sglang", "vllm-devices", "native-devices"])
def test_engines_elsewhere_take_nothing_of_the_trainers_device_and_the_table_says_so(rollout):
    found = estimate(**rollout)
    assert {part.name for part in found.parts} == {part.name for part in ELSEWHERE.parts}
    assert found.total == ELSEWHERE.total < estimate().total
    assert kept_between_rollouts(config(**rollout), FACTS) == 0
    assert "not in it" in memory_table(found)


def test_of_named_devices_the_trainers_own_counts_and_never_sleeps():
    found = estimate(num_replicas=2, replicas={"devices": [0, 1]}, **vllm())
    assert training(found) == pytest.approx(training(ELSEWHERE) + SHARE + DEVICE_CONTEXT_BYTES)
    assert "devices [1] are not in it" in memory_table(found)


def test_native_replicas_hold_weights_and_caches_of_their_own():
    alone, three = estimate(max_running=8), estimate(max_running=8, num_replicas=3)
    assert three.part("KV cache") == 3 * alone.part("KV cache") > 0
    assert three.part("weights of rollout replicas") == 3 * 2 * SHAPE.num_parameters
    held = three.part("KV cache") + three.part("weights of rollout replicas") + 3 * DEVICE_CONTEXT_BYTES
    assert kept_between_rollouts(config(max_running=8, num_replicas=3), FACTS) == held
    asleep = config(max_running=8, num_replicas=3, keep_cache=False)
    assert kept_between_rollouts(asleep, FACTS) == held - three.part("KV cache")


def test_a_replica_has_slots_for_its_part_of_the_samples_and_the_routers_margin():
    batch = config().batch
    samples = batch.num_prompts * batch.num_samples
    most = samples // 2 + config().rollout.replicas.affinity_margin
    room = {"max_running": 10 * samples, "num_replicas": 2}
    assert estimate(**room).part("KV cache") == 2 * estimate(max_running=most).part("KV cache")


def test_vllm_on_a_cpu_has_weights_and_a_cache_that_never_go():
    facts = RunFacts(SHAPE, 4, 512, on_cpu=True)
    found = estimate_run(config(**vllm(kv_cache_gb=3)), facts)
    assert found.part("vLLM's KV cache") == 3 * GIB
    assert found.part("vLLM's weights") == 4 * SHAPE.num_parameters
    assert kept_between_rollouts(config(**vllm(kv_cache_gb=3)), facts) == 3 * GIB + 4 * SHAPE.num_parameters


def test_a_share_of_a_device_nobody_named_is_not_guessed():
    found = estimate_run(config(**vllm(mode="colocated")), RunFacts(SHAPE, 2, 512))
    assert found.total == ELSEWHERE.total
    assert "vLLM's share (0.5 of the device's memory) is not in it" in memory_table(found)


@pytest.mark.parametrize("sleep_level", [0, 1])
def test_what_is_proposed_to_make_a_vllm_fit_is_of_its_own_keys_and_valid(sleep_level):
    crowded = config(**vllm(mode="colocated", gpu_memory_utilization=0.9, sleep_level=sleep_level))
    usable = usable_bytes(DEVICE)
    assert estimate_run(crowded, FACTS).total > usable
    ways = ways_to_fit(crowded, FACTS, usable)
    assert any(way.setting.startswith("rollout.vllm.gpu_memory_utilization: ") for way in ways)
    for way in ways:
        assert estimate_run(way.config, FACTS).total <= usable
        load_config(None, [], sections=way.config.model_dump(exclude_unset=True))  # no rule refuses it


def test_a_vllm_that_could_sleep_is_proposed_to():
    crowded = config(**vllm(mode="colocated", sleep_level=0))
    usable = estimate(**vllm(mode="colocated")).total
    assert "rollout.vllm.sleep_level: 1" in [way.setting for way in ways_to_fit(crowded, FACTS, usable)]


def test_a_dry_run_refuses_a_share_beside_a_trainer_that_needs_the_rest(tmp_path, capsys):
    shape_config("qwen3-1.7b").save_pretrained(tmp_path / "model")
    settings = [f"model.path={tmp_path / 'model'}", "task.name=word_sorting", "batch.token_budget=16384"]
    engine = ["rollout.engine=vllm", "rollout.vllm.sleep_level=0", "cluster.device=cuda"]
    command = ["train", *settings, *engine, "cluster.device_name=H200", "--dry-run"]
    assert main([*command, "rollout.vllm.gpu_memory_utilization=0.6"]) == 2
    refusal = capsys.readouterr().err
    assert "rollout.vllm.sleep_level: 1" in refusal and "rollout.vllm.gpu_memory_utilization: 0." in refusal
    assert main([*command, "rollout.vllm.gpu_memory_utilization=0.3"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "vLLM's share" in line]
    assert " ".join(row.split()) == f"vLLM's share of the device {0.3 * 141e9 / GIB:.2f} always there"
