"""Memory of the models among a reward's sources: their weights, and one forward-only pass of each."""

from collections.abc import Mapping
from dataclasses import replace

from paceline.config.parallelism import role_sizes
from paceline.config.reward_schema import JudgeSource, ModelSource, Quantization
from paceline.config.rewards import model_source_budget, reward_sources
from paceline.config.schema import Config
from paceline.planner.activations import LayerExecution
from paceline.planner.memory import (
    HeadKind,
    Part,
    Sharding,
    TrainedModel,
    estimate_model,
    kv_cache_bytes,
)
from paceline.planner.model_shape import MemoryShape

_LINEAR_BYTES: Mapping[Quantization, float] = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
"""Bytes per weight of a linear layer: int8 keeps one float32 scale per row, which is nothing beside the row; nf4 one
per block of 64 (bitsandbytes' defaults)."""

_SLOT_STEP = 32


def reward_model_parts(
    config: Config, shapes: Mapping[str, MemoryShape], element_bytes: int, longest_prompt: int, on_cpu: bool
) -> tuple[list[Part], list[str]]:
    """Parts of every source that is a model, and notes on those whose shape nobody knows yet.

    `shapes` by the source's name; `longest_prompt` in tokens, which a judge's request contains.
    """
    parts: list[Part] = []
    notes: list[str] = []
    for name, source in reward_sources(config).items():
        if not isinstance(source, ModelSource | JudgeSource):
            continue
        if name not in shapes:
            notes.append(f"reward.sources.{name} is not in it: its model's config.json is not there to read")
            continue
        width = _element_bytes(config, source, element_bytes)
        if isinstance(source, ModelSource):
            found = _classifier(config, source, shapes[name], width, on_cpu)
        else:
            found = _judge(config, source, shapes[name], width, longest_prompt)
        role = f"reward {name}"
        parts += [Part(part.name, part.num_bytes, part.phase, role) for part in found]
    return parts, notes


def _element_bytes(config: Config, source: ModelSource | JudgeSource, of_the_actor: int) -> int:
    named = source.dtype
    if named is None or named == config.model.dtype:
        return of_the_actor
    return {"float32": 4, "bfloat16": 2}.get(named, of_the_actor)


def _weights(
    shape: MemoryShape, element_bytes: int, quantization: Quantization, num_shards: int, parked: bool
) -> Part:
    if quantization == "none":
        num_bytes = float(element_bytes * shape.num_parameters)
    else:
        outside = shape.embedding_parameters + shape.head_parameters
        linear = shape.num_parameters - outside
        num_bytes = _LINEAR_BYTES[quantization] * linear + element_bytes * outside
    return Part("weights", num_bytes / num_shards, "scoring" if parked else "always")


def _classifier(
    config: Config, source: ModelSource, shape: MemoryShape, element_bytes: int, on_cpu: bool
) -> list[Part]:
    shape = replace(shape, tied_head=True)  # one row in the place of an output head
    sizes = role_sizes(config, "reward")
    sharding = Sharding(shard=sizes.shard * sizes.sequence_parallel, tensor=sizes.tensor_parallel)
    model = TrainedModel(
        shape=shape,
        token_budget=1,
        response_tokens=1,
        forward_token_budget=model_source_budget(config, source),
        how=LayerExecution(
            kind="eager",
            attention="pieces" if on_cpu else "grouped",
            element_bytes=element_bytes,
            frozen=True,
        ),
        head=None,
        sharding=sharding,
    )
    shards = sharding.shard * sharding.tensor
    weights = _weights(shape, element_bytes, source.quantization, shards, source.host_between_uses)
    return [weights, *(part for part in estimate_model(model) if part.phase == "scoring")]


def _judge(
    config: Config, source: JudgeSource, shape: MemoryShape, element_bytes: int, longest_prompt: int
) -> list[Part]:
    """Whole on every rank; its request holds the question and the completion."""
    request = longest_prompt + config.rollout.max_new_tokens
    capacity = -(-(request + source.max_new_tokens) // _SLOT_STEP) * _SLOT_STEP
    if shape.max_context is not None:
        capacity = min(capacity, shape.max_context)
    budget = config.batch.forward_token_budget or 2 * config.batch.token_budget
    model = TrainedModel(
        shape=shape,
        token_budget=1,
        response_tokens=1,
        forward_token_budget=budget,
        how=LayerExecution(kind="eager", element_bytes=element_bytes, frozen=True),
        head=HeadKind(chunk=source.max_running),
    )
    weights = _weights(shape, element_bytes, source.quantization, 1, source.host_between_uses)
    cache = kv_cache_bytes(shape, element_bytes, source.max_running, capacity)
    passes = (part for part in estimate_model(model) if part.phase == "scoring")
    return [weights, Part("KV cache", cache, "scoring"), *passes]
