"""Whether a run fits its device, and which settings would make it fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.config.decisions import num_engines_beside_the_trainer
from paceline.config.errors import ConfigError
from paceline.config.parallelism import mesh_sizes
from paceline.config.schema import Config
from paceline.config.section import Section
from paceline.config.sft import is_sft
from paceline.planner.memory import DEVICE_CONTEXT_BYTES, GIB, MemoryEstimate
from paceline.planner.run_facts import RunFacts
from paceline.planner.run_memory import estimate_run
from paceline.telemetry.hardware import lookup

_USABLE_SHARE = 0.95
_BUDGET_STEP = 256
_MOST_ON_DEVICE = 65_536
_MOST_ON_CPU = 16_384
_SHARE_STEP = 0.05
_SMALLEST_SHARE = 0.2
_S = TypeVar("_S", bound=Section)


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of settings, as a person would write it, and the peak it gives."""

    setting: str
    config: Config
    total: float


def usable_bytes(device_bytes: float) -> float:
    """What a run may plan with: the device's context and 5 % lost between blocks of the allocator are left out."""
    return max(0.0, device_bytes * _USABLE_SHARE - DEVICE_CONTEXT_BYTES)


def stated_device_bytes(config: Config) -> float | None:
    """Memory of one device as the config states it, in bytes; None where it does not.

    Raises:
        ConfigError: `cluster.device_name` is not in the table.
    """
    cluster = config.cluster
    if cluster.device_memory_gb is not None:
        return cluster.device_memory_gb * 1e9
    if cluster.device_name is None:
        return None
    hardware = lookup(cluster.device_name)
    if hardware is None:
        rule = "is not in the table of known devices; state its memory instead"
        raise ConfigError("cluster.device_name", cluster.device_name, rule, "cluster.device_memory_gb")
    return hardware.memory_gb * 1e9


def check_fit(config: Config, facts: RunFacts, device_bytes: float) -> MemoryEstimate:
    """The estimate, when it fits.

    Raises:
        ConfigError: it does not; every single switch that would make it fit is named with its estimate, or the
            shortest list of them found, or that nothing would.
    """
    estimate = estimate_run(config, facts)
    usable = usable_bytes(device_bytes)
    if estimate.total <= usable:
        return estimate
    role, phase = estimate.peak_phase
    advice = "; ".join(f"{s.setting} ({_gib(s.total)})" for s in ways_to_fit(config, facts, usable))
    rule = (
        f"the run needs {_gib(estimate.total)} per device (most in {role}: {phase}), and {_gib(usable)} of the "
        f"device's {_gib(device_bytes)} can be planned with"
    )
    nearest = advice or "no setting alone or together; a smaller model or more devices"
    raise ConfigError("batch.token_budget", config.batch.token_budget, rule, nearest)


def ways_to_fit(config: Config, facts: RunFacts, usable: float) -> list[Switch]:
    """Single changes that fit; where there is none, one accumulated change that does; empty when nothing does."""
    single = [switch for switch in _switches(config, facts, usable) if switch.total <= usable]
    if single:
        return single
    names: list[str] = []
    current, total = config, estimate_run(config, facts).total
    while total > usable:
        better = [s for s in _switches(current, facts, usable) if s.total < 0.99 * total]
        if not better:
            return []
        best = min(better, key=lambda switch: switch.total)
        names, current, total = [*names, best.setting], best.config, best.total
    return [Switch(" with ".join(names), current, total)]


def largest_budget(config: Config, facts: RunFacts, usable: float, most: int = 1 << 20) -> int | None:
    """The largest `batch.token_budget` up to `most` that fits, else in steps of 256 tokens; None when 256 do not."""
    if estimate_run(config, facts, most).total <= usable:
        return most
    low, high = 0, most // _BUDGET_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if estimate_run(config, facts, middle * _BUDGET_STEP).total <= usable:
            low = middle
        else:
            high = middle - 1
    return low * _BUDGET_STEP or None


def most_useful_budget(config: Config, longest_sample: int, on_cpu: bool) -> int:
    """Tokens beyond which a larger budget gains nothing: a whole mini-batch in one micro-batch, or more tokens than
    keep the device busy."""
    batch, sizes = config.batch, mesh_sizes(config.cluster)
    prompts = batch.mini_batch_prompts or batch.num_prompts
    per_rank = -(-prompts * batch.num_samples // sizes.num_data) * longest_sample
    most = _MOST_ON_CPU if on_cpu else _MOST_ON_DEVICE
    return max(-(-longest_sample // sizes.sequence_parallel), min(per_rank // sizes.sequence_parallel, most))


def automatic_budget(config: Config, facts: RunFacts, device_bytes: float, longest_sample: int) -> int:
    """The token budget that `auto` begins with.

    Raises:
        ConfigError: not even the longest sample fits; the switches that would make it fit are named.
    """
    usable = usable_bytes(device_bytes)
    found = largest_budget(config, facts, usable, most_useful_budget(config, longest_sample, facts.on_cpu))
    shortest = -(-longest_sample // mesh_sizes(config.cluster).sequence_parallel)
    if found is None or found < shortest:
        check_fit(with_budget(config, shortest), facts, device_bytes)
        found = shortest
    return found


def with_budget(config: Config, tokens: int) -> Config:
    """The config with that token budget."""
    return config.model_copy(update={"batch": config.batch.model_copy(update={"token_budget": tokens})})


def _switches(config: Config, facts: RunFacts, usable: float) -> Iterator[Switch]:
    for key, value in _changes(config):
        changed = _with_setting(config, key, value)
        yield Switch(f"{key}: {_written(value)}", changed, estimate_run(changed, facts).total)
    budget = largest_budget(config, facts, usable, config.batch.token_budget)
    if budget is not None and budget < config.batch.token_budget:
        changed = with_budget(config, budget)
        yield Switch(f"batch.token_budget: {budget}", changed, estimate_run(changed, facts).total)
    if (smaller := _smaller_vllm(config, facts, usable)) is not None:
        yield smaller


def _changes(config: Config) -> Iterator[tuple[str, object]]:
    """Settings that take less memory, the cheapest in time first; only those that change anything."""
    train, cluster = config.train, config.cluster
    if train.gradient_checkpointing == "none":
        yield "train.gradient_checkpointing", "selective"
    if train.gradient_checkpointing != "all":
        yield "train.gradient_checkpointing", "all"
    if not train.param_offload and config.algorithm.kl_coefficient > 0.0 and config.lora.rank == 0:
        yield "train.param_offload", True
    if not train.optimizer_offload:
        yield "train.optimizer_offload", True
    if not train.activation_offload:
        yield "train.activation_offload", True
    if train.logprob_chunk > 1024:
        yield "train.logprob_chunk", 1024
    if not is_sft(config):
        yield from _engine_changes(config)
    if cluster.replicate_size == 1 and cluster.shard_size is None:
        yield "cluster.num_devices", 2 * cluster.num_devices


def _engine_changes(config: Config) -> Iterator[tuple[str, object]]:
    """Of the rollout engines on the trainer's device; each engine has keys of its own."""
    rollout = config.rollout
    if num_engines_beside_the_trainer(config) == 0:
        return
    if rollout.engine == "native":
        if rollout.keep_cache:
            yield "rollout.keep_cache", False
        if rollout.max_running > 16:
            yield "rollout.max_running", rollout.max_running // 2
    elif rollout.vllm.sleep_level == 0 and not rollout.replicas.devices:
        yield "rollout.vllm.sleep_level", 1


def _smaller_vllm(config: Config, facts: RunFacts, usable: float) -> Switch | None:
    """The largest share of the device, in steps, with which the run fits; else the smallest that is of use."""
    if config.rollout.engine != "vllm" or num_engines_beside_the_trainer(config) == 0 or is_sft(config):
        return None
    if facts.device_bytes is None:
        return None
    found, share = None, config.rollout.vllm.gpu_memory_utilization
    while (share := round(share - _SHARE_STEP, 2)) >= _SMALLEST_SHARE:
        changed = _with_setting(config, "rollout.vllm.gpu_memory_utilization", share)
        total = estimate_run(changed, facts).total
        found = Switch(f"rollout.vllm.gpu_memory_utilization: {share:g}", changed, total)
        if total <= usable:
            break
    return found


def _with_setting(config: Config, key: str, value: object) -> Config:
    """The config with the setting of a dotted key; the key is one of the schema's."""
    return _changed(config, key.split("."), value)


def _changed(section: _S, names: Sequence[str], value: object) -> _S:
    name, *inner = names
    new = _changed(getattr(section, name), inner, value) if inner else value
    return section.model_copy(update={name: new})


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
