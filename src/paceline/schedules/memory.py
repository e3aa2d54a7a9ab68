"""Whether a run fits the device it is on, decided before weights are read."""

from collections.abc import Sequence

import psutil
import torch

from paceline.config import Config, ConfigError
from paceline.config.critic import critic_model, has_critic
from paceline.config.reward_schema import JudgeSource, ModelSource
from paceline.config.rewards import reward_sources, source_model
from paceline.config.schema import AUTO_TOKEN_BUDGET, BatchSection, ModelSection
from paceline.engine.budget_probe import DeviceMeter, MeasuredCost, MemoryMeter, measure_cost
from paceline.engine.memory_shortage import give_back_memory, lighter_settings
from paceline.engine.model_engine import ModelEngine
from paceline.engine.trainer import TrainEngine
from paceline.model.loading import model_settings, resolve_dtype
from paceline.planner.fit import (
    automatic_budget,
    check_fit,
    most_useful_budget,
    stated_device_bytes,
    usable_bytes,
    with_budget,
)
from paceline.planner.memory import GIB
from paceline.planner.model_shape import MemoryShape
from paceline.planner.run_facts import RunFacts
from paceline.planner.run_memory import kept_between_rollouts
from paceline.schedules.place import Place


def settle_budget(config: Config, place: Place, longest_prompt: int, longest_sample: int) -> Config:
    """The config with a number for `batch.token_budget: auto`, the same on every rank, after the run was held against
    its device. Every rank must call it.

    A CPU is checked against `cluster.device_memory_gb` only: what a host can page out nobody knows before.

    Raises:
        ConfigError: the estimate exceeds the device's memory, or `auto` cannot be estimated for the model.
    """
    device = place.device
    facts = run_facts(config, device, longest_prompt)
    if config.batch.token_budget == AUTO_TOKEN_BUDGET:
        if facts is None:
            rule = "memory of this model's layers is not modelled, so the budget must be given"
            raise ConfigError("batch.token_budget", "auto", rule, str(BatchSection().token_budget))
        smallest = min(place.mesh.gather_objects(device_memory(config, place)))
        return with_budget(config, automatic_budget(config, facts, smallest, longest_sample))
    device_bytes = stated_device_bytes(config) if device.type == "cpu" else device_memory(config, place)
    if facts is not None and device_bytes is not None:
        check_fit(config, facts, device_bytes)
    return config


def probe_budget(
    config: Config,
    trainer: TrainEngine,
    others: Sequence[ModelEngine],
    place: Place,
    longest_prompt: int,
    longest_sample: int,
) -> str:
    """Replaces the budget the estimate gave by one that two real micro-batches allow, and says what was found.

    Every rank must call it. `others` are engines whose optimiser states are still to come. A CPU's allocator keeps no
    peak: there the estimate stands.

    Raises:
        ConfigError: not even the longest sample fits.
    """
    engine, device = trainer.engine, trainer.model.device
    estimated = f"{engine.budget.tokens:,} tokens per micro-batch"
    if device.type == "cpu":
        return f"{estimated}, estimated"
    cost = _measure(trainer, DeviceMeter(device), longest_sample)
    facts = run_facts(config, device, longest_prompt)
    assert facts is not None  # the budget that was estimated came from them
    to_come = sum(other.optimizer.bytes_to_come() for other in (engine, *others))
    to_come += int(kept_between_rollouts(config, facts))
    usable = usable_bytes(device_memory(config, place)) - to_come
    own = cost.largest(usable, most_useful_budget(config, longest_sample, on_cpu=False))
    found = min(engine.mesh.gather_objects(own))
    if found * engine.mesh.sp_size < longest_sample:
        rule = f"a sample of {longest_sample} tokens needs more memory than the {usable / GIB:.1f} GiB left for it"
        raise ConfigError("batch.token_budget", "auto", rule, ", ".join(lighter_settings(config.train)))
    engine.budget.tokens = found
    return (
        f"{found:,} tokens per micro-batch (estimated {estimated}; measured {cost.per_token / 1024:,.0f} KiB per token "
        f"and {(cost.held + cost.fixed) / GIB:.1f} GiB beside them)"
    )


def _measure(trainer: TrainEngine, meter: MemoryMeter, longest_sample: int) -> MeasuredCost:
    """The cost at the engine's budget, or at the next smaller one that memory allows."""
    engine = trainer.engine

    def run(num_tokens: int) -> None:
        if not trainer.rehearse(num_tokens, longest_sample):
            raise _TooLargeError

    while True:
        try:
            return measure_cost(run, engine.budget.tokens, meter)
        except _TooLargeError:
            pass  # the budget is smaller now
        finally:
            engine.optimizer.zero_grad()
            give_back_memory(engine.model.device)


class _TooLargeError(Exception):
    """Memory ran out in a rehearsal."""


def device_memory(config: Config, place: Place) -> float:
    """Bytes a rank may think of as its own: stated, or all of an accelerator, or its part of what the host has free."""
    if config.cluster.device_memory_gb is not None:
        return config.cluster.device_memory_gb * 1e9
    if place.device.type == "cpu":
        return psutil.virtual_memory().available / place.num_local_ranks
    return _physical_memory(place.device)


def _physical_memory(device: torch.device) -> float:
    return float(torch.get_device_module(device).mem_get_info(device)[1])


def run_facts(config: Config, device: torch.device, longest_prompt: int) -> RunFacts | None:
    """What the estimate needs beside the config; None where the model's layers are not modelled."""
    try:
        shape = _shape(config.model)
        critic_shape = _shape(critic_model(config)) if has_critic(config) else None
        source_shapes = {
            name: _shape(source_model(config, source))
            for name, source in reward_sources(config).items()
            if isinstance(source, ModelSource | JudgeSource)
        }
    except ValueError:  # a kind of layer without formulas: a run is not refused for what nobody can say
        return None
    return RunFacts(
        shape,
        element_bytes=resolve_dtype(config.model.dtype, device).itemsize,
        longest_prompt=longest_prompt,
        on_cpu=device.type == "cpu",
        critic_shape=critic_shape,
        source_shapes=source_shapes,
        device_bytes=None if device.type == "cpu" else _physical_memory(device),
    )


def _shape(settings: ModelSection) -> MemoryShape:
    return MemoryShape.from_hf_config(model_settings(settings))
