"""Memory that rollout engines take on the trainer's own device, by where they run and whether they sleep.

Engines elsewhere take none of it. Those beside the trainer hold what they hold once each: a native one in the
trainer's process cache and passes, a native replica a copy of the weights besides, vLLM a stated share of the device.
"""

from dataclasses import replace

from paceline.config.arithmetic import batch_arithmetic
from paceline.config.decisions import (
    num_engines_beside_the_trainer,
    shares_weights,
    sleeps_between_rollouts,
)
from paceline.config.parallelism import mesh_sizes
from paceline.config.schema import Config
from paceline.planner.memory import (
    DEVICE_CONTEXT_BYTES,
    GIB,
    Part,
    Phase,
    Sharding,
    TrainedModel,
    divided,
    estimate_model,
    frozen_weights,
    kv_cache_bytes,
)
from paceline.planner.run_facts import RunFacts

_SLOT_STEP = 32


def rollout_parts(config: Config, facts: RunFacts, actor: TrainedModel) -> tuple[list[Part], list[str]]:
    """Parts of every engine on the trainer's device, and notes on what is assumed or is not in them."""
    num_engines = num_engines_beside_the_trainer(config)
    notes = _notes_on_engines_elsewhere(config, num_engines)
    if num_engines == 0:
        return [], notes
    if config.rollout.engine == "vllm":
        parts = _vllm(config, facts, num_engines, notes)
    else:
        longest_prompt = _longest_prompt(config, facts, notes)
        if shares_weights(config):
            parts = _native(config, facts, actor, longest_prompt, num_engines=1)
        else:
            whole = replace(actor, sharding=Sharding())
            weights = num_engines * frozen_weights(facts.shape, facts.element_bytes, whole.sharding)
            parts = _native(config, facts, whole, longest_prompt, num_engines)
            parts.append(Part("weights of rollout replicas", weights, "always"))
    if not facts.on_cpu and _has_processes_of_its_own(config):
        contexts = float(num_engines * DEVICE_CONTEXT_BYTES)
        parts.append(Part("device contexts of rollout engines", contexts, "always"))
    return parts, notes


def _notes_on_engines_elsewhere(config: Config, num_beside: int) -> list[str]:
    rollout = config.rollout
    if rollout.replicas.devices and num_beside < rollout.num_replicas:
        elsewhere = sorted(set(rollout.replicas.devices) - ({0} if num_beside else set()))
        return [f"rollout engines on devices {elsewhere} are not in it"]
    if num_beside == 0:
        key = f"rollout.{rollout.engine}.addresses"
        return [f"the servers of {key} are not in it: they are taken to run on devices of their own"]
    return []


def _has_processes_of_its_own(config: Config) -> bool:
    in_process = config.rollout.engine == "vllm" and config.rollout.vllm.mode == "colocated"
    return not (shares_weights(config) or in_process)


def _while_sampling_or_always(config: Config) -> Phase:
    return "rollout" if sleeps_between_rollouts(config) else "always"


# --- vLLM ---


def _vllm(config: Config, facts: RunFacts, num_engines: int, notes: list[str]) -> list[Part]:
    """Weights, cache and passes together are one share of the device; the CPU build is given its cache alone, and has
    no sleep."""
    vllm = config.rollout.vllm
    if facts.on_cpu:
        width = {"auto": facts.element_bytes, "float32": 4, "bfloat16": 2}[vllm.dtype]
        weights = frozen_weights(facts.shape, width, Sharding())
        return [
            Part("vLLM's weights", num_engines * weights, "always"),
            Part("vLLM's KV cache", num_engines * vllm.kv_cache_gb * GIB, "always"),
        ]
    share = vllm.gpu_memory_utilization
    if facts.device_bytes is None:
        notes.append(f"vLLM's share ({share:g} of the device's memory) is not in it, as no device is named")
        return []
    if not vllm.enforce_eager:
        notes.append("vLLM's captured graphs come on top of its share and are not in it")
    taken = num_engines * share * facts.device_bytes
    return [Part("vLLM's share of the device", taken, _while_sampling_or_always(config))]


# --- native engines ---


def _longest_prompt(config: Config, facts: RunFacts, notes: list[str]) -> int:
    if facts.longest_prompt is not None:
        return facts.longest_prompt
    limit = config.rollout.max_new_tokens
    context = batch_arithmetic(config).max_context or facts.shape.max_context
    assumed = limit if context is None else max(1, min(limit, context - limit))
    notes.append(f"prompts are taken to have up to {assumed:,} tokens until the task is read")
    return assumed


def _native(
    config: Config, facts: RunFacts, model: TrainedModel, longest_prompt: int, num_engines: int
) -> list[Part]:
    """KV cache, decoding logits and the widest prefill of so many engines, each with `model` as it holds it."""
    rollout = config.rollout
    capacity = -(-(longest_prompt + rollout.max_new_tokens) // _SLOT_STEP) * _SLOT_STEP
    num_slots = _most_at_a_time(config)
    own = divided(facts.shape, model.sharding.tensor)
    cache = kv_cache_bytes(own, facts.element_bytes, num_slots, capacity)
    if rollout.kv_cache_gb is not None:
        cache = min(cache, rollout.kv_cache_gb * GIB)
    prefill = next(part for part in estimate_model(model) if part.phase == "scoring").num_bytes
    logits = num_slots * own.model.vocab_size * (facts.element_bytes + 16.0)
    return [
        Part("KV cache", num_engines * cache, _while_sampling_or_always(config)),
        Part("prefill and decoding", num_engines * max(prefill, logits), "rollout"),
    ]


def _most_at_a_time(config: Config) -> int:
    """Samples that one native engine runs at the same time. The router may give a replica more than its part, up to
    its affinity margin."""
    rollout, sizes = config.rollout, batch_arithmetic(config)
    most = max(sizes.samples_per_step, sizes.completions_per_evaluation)
    of_a_rank = -(-most // mesh_sizes(config.cluster).num_data)
    if rollout.num_replicas > 1:
        of_a_rank = -(-of_a_rank // rollout.num_replicas) + rollout.replicas.affinity_margin
    return min(rollout.max_running, of_a_rank)
