"""Rules of the rollout engines. Each is one function: a config in, the problem (or None) out.

Refused is what cannot work or would do nothing; what works and is slow is advice (`config/engine_advice.py`).
"""

from paceline.config.engine_schema import SglangSection, VllmSection
from paceline.config.errors import ConfigError
from paceline.config.schema import Config

ENGINE_ARGUMENT_KEYS = {
    "model": "model.path",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.vllm.dtype",
    "max_model_len": "model.max_context",
    "seed": "run.seed",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "max_num_seqs": "rollout.vllm.max_num_seqs",
    "max_num_batched_tokens": "rollout.vllm.max_num_batched_tokens",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "compilation_config": "rollout.vllm.cudagraph_capture_sizes",
    "cudagraph_capture_sizes": "rollout.vllm.cudagraph_capture_sizes",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "enable_prefix_caching": "rollout.vllm.enable_prefix_caching",
    "enable_chunked_prefill": "rollout.vllm.enable_chunked_prefill",
    "block_size": "rollout.vllm.block_size",
    "kv_cache_dtype": "rollout.vllm.kv_cache_dtype",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_gb",
    "async_scheduling": "rollout.vllm.async_scheduling",
    "enable_sleep_mode": "rollout.vllm.sleep_level",
}
"""vLLM's arguments that have a key of their own, and the key."""

SET_BY_THE_RUN = frozenset(
    {
        *("load_format", "skip_tokenizer_init", "tokenizer", "generation_config", "logprobs_mode"),
        *("disable_log_stats", "worker_extension_cls"),
    }
)
"""vLLM's arguments that a run fixes: samples would be wrong, or unseen, otherwise."""


def engine_settings_act(config: Config) -> ConfigError | None:
    """Settings of an engine that is not chosen would do nothing in silence."""
    rollout = config.rollout
    for name, section in (("vllm", rollout.vllm), ("sglang", rollout.sglang)):
        changed = section.model_dump(exclude_defaults=True)
        if changed and rollout.engine != name:
            key, value = next(iter(changed.items()))
            rule = f"has no effect with rollout.engine: {rollout.engine}"
            return ConfigError(
                f"rollout.{name}.{key}", value, rule, f"rollout.engine: {name}, or leave it out"
            )
    if rollout.replicas.model_fields_set and rollout.engine == "native" and rollout.num_replicas == 1:
        changed = rollout.replicas.model_dump(exclude_defaults=True)
        if changed:
            key, value = next(iter(changed.items()))
            rule = "has no effect with one native engine in the trainer's own process"
            nearest = "rollout.num_replicas: 2, or leave it out"
            return ConfigError(f"rollout.replicas.{key}", value, rule, nearest)
    return None


def cache_settings_belong_to_the_engine(config: Config) -> ConfigError | None:
    rollout = config.rollout
    if rollout.engine == "native":
        return None
    if rollout.engine == "vllm":
        places = {
            "max_running": "rollout.vllm.max_num_seqs",
            "kv_cache_gb": "rollout.vllm.gpu_memory_utilization",
        }
        places |= {"keep_cache": "rollout.vllm.sleep_level", "cache": "pages of its own"}
    else:
        places = dict.fromkeys(
            ("max_running", "kv_cache_gb", "keep_cache", "cache"), "the server's own options"
        )
    for key, value in rollout.model_dump(include=set(places), exclude_defaults=True).items():
        rule = f"is the native engine's; {rollout.engine} is given {places[key]}"
        return ConfigError(f"rollout.{key}", value, rule, f"{places[key]}, or leave it out")
    return None


def exact_rollouts_are_native(config: Config) -> ConfigError | None:
    rollout = config.rollout
    if not rollout.exact or rollout.engine == "native":
        return None
    rule = f"is the native engine's; {rollout.engine} computes with kernels of its own"
    return ConfigError("rollout.exact", True, rule, "rollout.engine: native, or false")


def drafts_can_be_verified(config: Config) -> ConfigError | None:
    rollout = config.rollout
    if rollout.speculation == "off":
        set_ones = rollout.model_dump(include={"draft_tokens", "speculate_below"}, exclude_defaults=True)
        for key, value in set_ones.items():
            rule = "has no effect while rollout.speculation is off"
            return ConfigError(f"rollout.{key}", value, rule, "rollout.speculation: auto")
        return None
    if rollout.engine != "native":
        rule = f"is the native engine's; {rollout.engine} has options of its own"
        return ConfigError("rollout.speculation", rollout.speculation, rule, "rollout.engine: native, or off")
    if rollout.cache == "slots":
        return ConfigError("rollout.cache", "slots", "verifies no drafts (rollout.speculation)", "paged")
    return None


def over_sampling_can_stop(config: Config) -> ConfigError | None:
    """Which groups are complete is known where all of them are sampled, round by round."""
    rollout = config.rollout
    if not rollout.oversample:
        return None
    in_the_way = {
        "rollout.engine": (rollout.engine != "native", rollout.engine, "native"),
        "rollout.num_replicas": (rollout.num_replicas > 1, rollout.num_replicas, "1"),
        "cluster.num_devices": (config.cluster.num_devices > 1, config.cluster.num_devices, "1"),
        "algorithm.dynamic_sampling": (bool(config.algorithm.dynamic_sampling), True, "false"),
        "rollout.record": (rollout.record is not None, rollout.record, "null"),
        "rollout.replay": (rollout.replay is not None, rollout.replay, "null"),
        "agent.tools": (bool(config.agent.tools), list(config.agent.tools), "[]"),
        "agent.program": (config.agent.program is not None, config.agent.program, "null"),
    }
    for key, (is_set, value, nearest) in in_the_way.items():
        if is_set:
            rule = "does not go with rollout.oversample"
            return ConfigError(key, value, rule, f"{nearest}, or rollout.oversample: 0")
    return None


def vllm_batches_can_be_scheduled(config: Config) -> ConfigError | None:
    if config.rollout.engine != "vllm":
        return None
    vllm, limit = config.rollout.vllm, config.rollout.max_new_tokens
    key, tokens = "rollout.vllm.max_num_batched_tokens", vllm.max_num_batched_tokens
    if tokens < vllm.max_num_seqs:
        rule = f"must be at least rollout.vllm.max_num_seqs = {vllm.max_num_seqs}: one token for each of them"
        return ConfigError(key, tokens, rule, str(vllm.max_num_seqs))
    context = config.model.max_context or limit + 1
    if not vllm.enable_chunked_prefill and tokens < context:
        rule = f"must hold a whole prompt of up to {context} tokens without enable_chunked_prefill"
        return ConfigError(key, tokens, rule, f"{context}, or rollout.vllm.enable_chunked_prefill: true")
    return None


def vllm_graphs_are_used(config: Config) -> ConfigError | None:
    vllm = config.rollout.vllm
    sizes = vllm.cudagraph_capture_sizes
    if not sizes:
        return None
    key = "rollout.vllm.cudagraph_capture_sizes"
    if vllm.enforce_eager:
        return ConfigError(key, list(sizes), "has no effect with enforce_eager: true", "enforce_eager: false")
    if max(sizes) > vllm.max_num_seqs:
        rule = f"sizes above rollout.vllm.max_num_seqs = {vllm.max_num_seqs} are captured and never used"
        return ConfigError(key, list(sizes), rule, str([s for s in sizes if s <= vllm.max_num_seqs]))
    return None


def vllm_runs_in_one_place(config: Config) -> ConfigError | None:
    rollout = config.rollout
    vllm = rollout.vllm
    if rollout.engine != "vllm":
        return None
    if vllm.mode == "colocated":
        if vllm.python is not None:
            rule = "is another process's; mode: colocated runs vLLM in the trainer's own"
            return ConfigError("rollout.vllm.python", vllm.python, rule, "mode: child, or leave it out")
        if rollout.num_replicas > 1:
            rule = "must be 1 with rollout.vllm.mode: colocated: a process holds one vLLM"
            return ConfigError("rollout.num_replicas", rollout.num_replicas, rule, "1, or mode: child")
        if rollout.replicas.devices:
            rule = "has no effect with rollout.vllm.mode: colocated, which uses the trainer's device"
            return ConfigError(
                "rollout.replicas.devices", list(rollout.replicas.devices), rule, "mode: child"
            )
    if vllm.addresses and vllm.mode != "server":
        rule = f"has no effect with rollout.vllm.mode: {vllm.mode}"
        return ConfigError("rollout.vllm.addresses", list(vllm.addresses), rule, "mode: server")
    if vllm.weight_transfer == "cuda_ipc" and (vllm.mode != "child" or rollout.replicas.devices):
        rule = "needs rollout.vllm.mode: child on the trainer's own device: handles do not leave it"
        return ConfigError("rollout.vllm.weight_transfer", "cuda_ipc", rule, "file")
    return None


def addresses_match_replicas(config: Config) -> ConfigError | None:
    rollout = config.rollout
    section: VllmSection | SglangSection = rollout.sglang if rollout.engine == "sglang" else rollout.vllm
    key = f"rollout.{rollout.engine}.addresses"
    addresses, wanted = section.addresses, rollout.num_replicas
    if rollout.engine == "sglang" and not addresses:
        return ConfigError(
            key, [], "must name the running server of every replica", "[http://127.0.0.1:30000]"
        )
    if not addresses or rollout.engine == "native":
        return None
    if len(addresses) != wanted:
        rule = f"must name one server for each of rollout.num_replicas = {wanted}"
        return ConfigError(key, list(addresses), rule, f"rollout.num_replicas: {len(addresses)}")
    bad = next((one for one in addresses if not one.startswith(("http://", "https://"))), None)
    if bad is not None:
        return ConfigError(key, list(addresses), "addresses begin with http:// or https://", f"http://{bad}")
    if config.cluster.num_devices > 1:
        rule = "serve one training process; with several, let the run start an engine for each"
        return ConfigError(key, list(addresses), rule, "rollout.vllm.mode: child")
    return None


def replicas_have_devices(config: Config) -> ConfigError | None:
    rollout = config.rollout
    devices, size = rollout.replicas.devices, rollout.vllm.tensor_parallel_size
    key = "rollout.replicas.devices"
    if devices:
        needed = rollout.num_replicas * size
        if config.cluster.device == "cpu":
            return ConfigError(key, list(devices), "names devices, and cluster.device is cpu", "leave it out")
        if len(devices) != needed:
            rule = f"must name {needed}: {size} for each of rollout.num_replicas = {rollout.num_replicas}"
            return ConfigError(key, list(devices), rule, f"{needed} devices")
        if len(set(devices)) != len(devices):
            return ConfigError(key, list(devices), "must name each device once", str(sorted(set(devices))))
        if config.cluster.num_devices > 1:
            rule = "serves one training process; with several, each engine uses its process's device"
            return ConfigError(key, list(devices), rule, "leave it out")
    elif size > 1 and rollout.vllm.mode != "server":
        rule = f"must be 1 on the trainer's own device; {size} devices must be named in {key}"
        return ConfigError(
            "rollout.vllm.tensor_parallel_size", size, rule, f"1, or {key}: {list(range(size))}"
        )
    return None


def engine_arguments_have_no_key(config: Config) -> ConfigError | None:
    for name, value in config.rollout.vllm.engine_args.items():
        key = f"rollout.vllm.engine_args.{name}"
        if name in ENGINE_ARGUMENT_KEYS:
            return ConfigError(key, value, "has a key of its own", ENGINE_ARGUMENT_KEYS[name])
        if name in SET_BY_THE_RUN:
            return ConfigError(key, value, "is set by the run: samples depend on it", "leave it out")
    return None


ENGINE_RULES = (
    engine_settings_act,
    cache_settings_belong_to_the_engine,
    exact_rollouts_are_native,
    drafts_can_be_verified,
    over_sampling_can_stop,
    vllm_batches_can_be_scheduled,
    vllm_graphs_are_used,
    vllm_runs_in_one_place,
    addresses_match_replicas,
    replicas_have_devices,
    engine_arguments_have_no_key,
)
