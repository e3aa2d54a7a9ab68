"""Settings of rollout engines: what is refused, what is advised against, and what follows from the choice."""

import pytest

from paceline.config import ConfigError, decide_old_logprob, load_config
from paceline.config.decisions import shares_weights, sleeps_between_rollouts
from paceline.config.engine_advice import engine_advice

BASE = {"model": {"path": "m"}, "task": {"name": "word_sorting"}}


def config(rollout, **sections):
    return load_config(sections={**BASE, **sections, "rollout": rollout})


def vllm(**settings):
    return {"engine": "vllm", "vllm": settings}


def devices(*numbers):
    return {"devices": numbers}


REFUSED = [
    ({"vllm": {"max_num_seqs": 8}}, "rollout.vllm.max_num_seqs", "no effect with rollout.engine: native"),
    ({"sglang": {"sleep": False}}, "rollout.sglang.sleep", "no effect with rollout.engine: native"),
    ({"replicas": {"timeout_s": 5.0}}, "rollout.replicas.timeout_s", "no effect with one native engine"),
    ({**vllm(), "max_running": 4}, "rollout.max_running", "rollout.vllm.max_num_seqs"),
    ({**vllm(), "kv_cache_gb": 4.0}, "rollout.kv_cache_gb", "rollout.vllm.gpu_memory_utilization"),
    ({**vllm(), "exact": True}, "rollout.exact", "kernels of its own"),
    ({**vllm(), "speculation": "auto"}, "rollout.speculation", "options of its own"),
    ({"speculation": "on", "cache": "slots"}, "rollout.cache", "verifies no drafts"),
    ({**vllm(), "oversample": 2}, "rollout.engine", "does not go with rollout.oversample"),
    ({"oversample": 2, "replay": "somewhere"}, "rollout.replay", "does not go with rollout.oversample"),
    ({"draft_tokens": 4}, "rollout.draft_tokens", "while rollout.speculation is off"),
    (vllm(max_num_batched_tokens=100), "rollout.vllm.max_num_batched_tokens", "one token for each"),
    (
        vllm(max_num_batched_tokens=256, max_num_seqs=8, enable_chunked_prefill=False),
        "rollout.vllm.max_num_batched_tokens",
        "whole prompt",
    ),
    (
        vllm(cudagraph_capture_sizes=(1, 2), enforce_eager=True),
        "rollout.vllm.cudagraph_capture_sizes",
        "no effect with enforce_eager",
    ),
    (
        vllm(cudagraph_capture_sizes=(1, 512), max_num_seqs=256),
        "rollout.vllm.cudagraph_capture_sizes",
        "captured and never used",
    ),
    (vllm(mode="colocated", python="/p"), "rollout.vllm.python", "another process's"),
    ({**vllm(mode="colocated"), "num_replicas": 2}, "rollout.num_replicas", "a process holds one vLLM"),
    (vllm(addresses=("http://h:1",)), "rollout.vllm.addresses", "no effect with rollout.vllm.mode: child"),
    (
        {**vllm(mode="server", addresses=("http://h:1",)), "num_replicas": 2},
        "rollout.vllm.addresses",
        "one server for each",
    ),
    (vllm(mode="server", addresses=("h:1",)), "rollout.vllm.addresses", "begin with http"),
    ({"engine": "sglang"}, "rollout.sglang.addresses", "must name the running server"),
    (vllm(tensor_parallel_size=2), "rollout.vllm.tensor_parallel_size", "must be named"),
    ({**vllm(), "replicas": devices(0, 1)}, "rollout.replicas.devices", "must name 1"),
    (
        {**vllm(tensor_parallel_size=2), "replicas": devices(1, 1)},
        "rollout.replicas.devices",
        "each device once",
    ),
    (
        {**vllm(mode="server"), "vllm": {"mode": "server", "weight_transfer": "cuda_ipc"}},
        "rollout.vllm.weight_transfer",
        "on the trainer's own device",
    ),
    (vllm(engine_args={"max_num_seqs": 4}), "rollout.vllm.engine_args.max_num_seqs", "has a key of its own"),
    (vllm(engine_args={"logprobs_mode": "raw"}), "rollout.vllm.engine_args.logprobs_mode", "set by the run"),
    ({**vllm(), "temperature": 0.0}, "rollout.temperature", "above 0 for training"),
    ({**vllm(), "top_p": 0.8}, "rollout.top_p", "truncated distribution"),
]


@pytest.mark.parametrize(
    ("rollout", "key", "rule"), REFUSED, ids=[f"{key}-{rule[:20]}" for _, key, rule in REFUSED]
)
def test_what_cannot_work_or_does_nothing_is_refused_with_the_key(rollout, key, rule):
    with pytest.raises(ConfigError) as caught:
        config(rollout)
    (problem,) = [one for one in caught.value.problems if one.key == key]
    assert rule in problem.rule + str(problem.nearest)
    assert problem.nearest


def test_the_settings_the_guides_recommend_are_accepted_without_advice():
    recommended = config(vllm(gpu_memory_utilization=0.6, max_num_batched_tokens=8192, max_num_seqs=256))
    assert engine_advice(recommended, on_cpu=False) == []
    assert engine_advice(config({}), on_cpu=False) == []


ADVISED = [
    (vllm(gpu_memory_utilization=0.85, sleep_level=0), "gpu_memory_utilization", "0.5 to 0.7"),
    (vllm(gpu_memory_utilization=0.3, sleep_level=0), "gpu_memory_utilization", "preempted"),
    ({**vllm(gpu_memory_utilization=0.5), "replicas": devices(1)}, "gpu_memory_utilization", "unused"),
    (
        {
            **vllm(gpu_memory_utilization=0.9),
            "replicas": devices(0),
        },  # the trainer's, and such a vLLM never sleeps
        "gpu_memory_utilization",
        "devices other than 0",
    ),
    (vllm(mode="server", gpu_memory_utilization=0.9, sleep_level=0), "gpu_memory_utilization", "0.5 to 0.7"),
    (vllm(max_num_batched_tokens=2048), "max_num_batched_tokens", "above 2048"),
    (vllm(max_num_seqs=16), "max_num_seqs", "at a time"),
    (vllm(enable_prefix_caching=False), "enable_prefix_caching", "8 times"),
    (vllm(enforce_eager=True), "enforce_eager", "host"),
    (vllm(cudagraph_capture_sizes=(1, 8)), "cudagraph_capture_sizes", "without a graph"),
    (vllm(cudagraph_capture_sizes=tuple(range(1, 130))), "cudagraph_capture_sizes", "GiB"),
]


@pytest.mark.parametrize(
    ("rollout", "key", "text"), ADVISED, ids=[f"{key}-{text}" for _, key, text in ADVISED]
)
def test_what_works_and_is_slow_is_said_and_not_refused(rollout, key, text):
    (advice,) = engine_advice(config(rollout), on_cpu=False)
    assert advice.key == f"rollout.vllm.{key}"
    assert text in str(advice)


def test_a_smaller_tensor_size_is_advised_where_the_weights_fit():
    large = config(
        {**vllm(tensor_parallel_size=4, gpu_memory_utilization=0.9), "replicas": devices(1, 2, 3, 4)}
    )
    sizes = {"weight_bytes": 16 * 2**30, "device_bytes": 140 * 2**30}
    (advice,) = engine_advice(large, on_cpu=False, **sizes)
    assert "with 1 already; 4 times as many replicas" in advice.text
    assert engine_advice(large, on_cpu=False, weight_bytes=200 * 2**30, device_bytes=140 * 2**30) == []


def test_an_engine_with_a_copy_gets_its_old_logprobs_recomputed_where_they_are_needed():
    several = {"num_prompts": 4, "mini_batch_prompts": 2}
    assert decide_old_logprob(config({}, batch=several)).source == "rollout"
    assert decide_old_logprob(config({"num_replicas": 2}, batch=several)).source == "rollout"
    assert decide_old_logprob(config(vllm(), batch=several)).source == "recompute"
    sglang = {"engine": "sglang", "sglang": {"addresses": ("http://h:1",)}}
    assert decide_old_logprob(config(sglang, batch=several)).source == "recompute"
    assert decide_old_logprob(config(vllm(), batch={"num_prompts": 4})).source == "current"


def test_only_one_native_engine_shares_the_trainers_weights():
    assert shares_weights(config({}))
    assert not shares_weights(config({"num_replicas": 2}))
    assert not shares_weights(config(vllm()))


def test_an_engine_on_the_trainers_device_sleeps_while_it_trains():
    assert sleeps_between_rollouts(config(vllm()))
    assert not sleeps_between_rollouts(config(vllm(sleep_level=0)))
    assert not sleeps_between_rollouts(config({**vllm(), "replicas": devices(1)}))
    assert sleeps_between_rollouts(config({"keep_cache": False}))


def test_settings_of_a_section_within_a_section_are_set_on_the_command_line_and_checked():
    set_there = load_config(
        overrides=["rollout.engine=vllm", "rollout.vllm.max_num_seqs=64", "rollout.replicas.max_restarts=0"],
        sections=BASE,
    )
    assert set_there.rollout.vllm.max_num_seqs == 64 and set_there.rollout.replicas.max_restarts == 0
    with pytest.raises(ConfigError, match=r"rollout.vllm.max_num_seq\b"):
        load_config(overrides=["rollout.engine=vllm", "rollout.vllm.max_num_seq=64"], sections=BASE)
    with pytest.raises(ConfigError, match=r"rollout.vllm.gpu_memory_utilization = 1.5"):
        config(vllm(gpu_memory_utilization=1.5))
