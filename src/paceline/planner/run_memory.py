"""From a run's config to its memory estimate: every role, every phase, per device."""

from collections.abc import Mapping
from dataclasses import replace

from paceline.config.critic import critic_batch, has_critic
from paceline.config.parallelism import mesh_sizes
from paceline.config.schema import BatchSection, Config
from paceline.config.sft import is_sft
from paceline.planner.activations import LayerExecution, Recomputation
from paceline.planner.memory import (
    HeadKind,
    MemoryEstimate,
    Part,
    Sharding,
    TrainedModel,
    estimate_model,
    frozen_weights,
)
from paceline.planner.model_shape import MemoryShape
from paceline.planner.reward_memory import reward_model_parts
from paceline.planner.rollout_memory import rollout_parts
from paceline.planner.run_facts import RunFacts

FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers `model/fused` computes (a test holds the two lists equal; this folder stays torch-free)."""


def estimate_run(config: Config, facts: RunFacts, token_budget: int | None = None) -> MemoryEstimate:
    """The whole run's estimate; `token_budget` replaces the config's (which may be auto)."""
    batch = config.batch
    if token_budget is not None:
        batch = batch.model_copy(update={"token_budget": token_budget})
    notes: list[str] = []
    actor = trained_model(config, facts, batch)
    parts = [*estimate_model(actor), *_reference(config, facts, actor)]
    if not is_sft(config):  # supervised updates sample nothing
        engines, on_engines = rollout_parts(config, facts, actor)
        parts += engines
        notes += on_engines
        prompt = facts.longest_prompt or config.rollout.max_new_tokens
        rewards, left_out = reward_model_parts(
            config, facts.source_shapes, facts.element_bytes, prompt, facts.on_cpu
        )
        parts += rewards
        notes += left_out
    if has_critic(config):
        shape = facts.critic_shape or facts.shape
        own_batch = critic_batch(config.model_copy(update={"batch": batch}))
        critic = replace(
            trained_model(config, replace(facts, shape=shape), own_batch),
            shape=replace(shape, tied_head=True),  # one row in the place of the output head
            head=None,
            num_trained=None,
        )
        parts += estimate_model(critic, "critic")
    return MemoryEstimate(tuple(parts), tuple(notes))


def kept_between_rollouts(config: Config, facts: RunFacts) -> float:
    """Bytes that rollout engines hold on the trainer's device while it updates."""
    parts, _ = rollout_parts(config, facts, trained_model(config, facts, config.batch))
    return sum(part.num_bytes for part in parts if part.phase == "always")


def trained_model(config: Config, facts: RunFacts, batch: BatchSection) -> TrainedModel:
    """The actor as the estimate sees it; its response tokens are taken to fill the budget."""
    train, shape = config.train, facts.shape
    sizes = mesh_sizes(config.cluster)
    gathered = 2 + train.forward_prefetch if train.reshard_after_forward else shape.model.num_layers
    return TrainedModel(
        shape=shape,
        token_budget=batch.token_budget,
        response_tokens=batch.token_budget,
        forward_token_budget=batch.forward_token_budget or 2 * batch.token_budget,
        how=layer_execution(config, facts),
        recompute=Recomputation(train.gradient_checkpointing, train.checkpoint_every, train.selective_keep),
        head=HeadKind(
            chunk=train.logprob_chunk,
            kernels=not facts.on_cpu,
            one_pass=not facts.on_cpu and train.preset == "fast" and sizes.num_ranks == 1,
            plain=config.rollout.temperature == 1.0,
            entropy_grad=config.algorithm.entropy_coefficient > 0.0,
        ),
        sharding=Sharding(
            shard=sizes.shard * sizes.sequence_parallel,
            tensor=sizes.tensor_parallel,
            gathered_layers=min(gathered, shape.model.num_layers),
        ),
        num_trained=num_adapter_parameters(config, shape) if config.lora.rank else None,
        optimizer_offload=train.optimizer_offload and not facts.on_cpu,
        activation_offload=train.activation_offload and not facts.on_cpu,
    )


def layer_execution(config: Config, facts: RunFacts) -> LayerExecution:
    """Who computes the layers. On an accelerator, kernels are taken to be installed."""
    fused = (
        not facts.on_cpu
        and config.train.preset == "fast"
        and config.cluster.tensor_parallel_size == 1
        and config.lora.rank == 0  # adapted products are no plain linear layers
        and facts.shape.family in FUSED_FAMILIES
        and facts.shape.silu
    )
    return LayerExecution(
        kind="fused" if fused else "eager",
        attention="pieces" if facts.on_cpu else "grouped",
        element_bytes=facts.element_bytes,
        frozen=config.lora.rank > 0,
    )


def num_adapter_parameters(config: Config, shape: MemoryShape) -> int:
    """Rank x (inputs + outputs) of every adapted linear layer."""
    hidden, query, key = shape.model.hidden_size, shape.query_width, shape.key_width
    width = shape.model.intermediate_size
    sizes: Mapping[str, int] = {
        "q_proj": hidden + query,
        "k_proj": hidden + key,
        "v_proj": hidden + key,
        "o_proj": hidden + query,
        "gate_proj": hidden + width,
        "up_proj": hidden + width,
        "down_proj": hidden + width,
    }
    chosen = config.lora.target_modules or tuple(sizes)
    return config.lora.rank * shape.model.num_layers * sum(sizes.get(name, 0) for name in chosen)


def _reference(config: Config, facts: RunFacts, actor: TrainedModel) -> list[Part]:
    if config.algorithm.kl_coefficient == 0.0 or config.lora.rank:
        return []  # adapters switched off are the reference
    weights = frozen_weights(facts.shape, facts.element_bytes, actor.sharding)
    parked = config.train.param_offload and not facts.on_cpu
    return [Part("reference weights", weights, "scoring" if parked else "always")]
