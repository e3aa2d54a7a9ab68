"""The memory part of `--dry-run`: from a config alone, on a machine that need not be the one that trains."""

from dataclasses import replace

from paceline.config.critic import critic_model, has_critic
from paceline.config.rewards import source_model_paths
from paceline.config.schema import AUTO_TOKEN_BUDGET, BatchSection, Config
from paceline.planner.fit import automatic_budget, check_fit, stated_device_bytes, with_budget
from paceline.planner.memory_table import memory_table
from paceline.planner.model_shape import MemoryShape, read_shape
from paceline.planner.run_facts import RunFacts
from paceline.planner.run_memory import estimate_run


def describe_memory(config: Config) -> str:
    """The estimate as a table, or why there is none.

    Raises:
        ConfigError: the config states a device, and the estimate exceeds its memory.
    """
    try:
        shape = read_shape(config.model.path)
        critic_shape = _critic_shape(config)
        source_shapes = _source_shapes(config)
    except ValueError as error:
        return f"memory per device: not estimated ({error})"
    if shape is None:
        return "memory per device: estimated when the model's config.json is there to read"
    notes: list[str] = []
    device_bytes = stated_device_bytes(config)
    facts = RunFacts(
        shape,
        element_bytes=_element_bytes(config, notes),
        on_cpu=config.cluster.device == "cpu",
        critic_shape=critic_shape,
        source_shapes=source_shapes,
        device_bytes=device_bytes,
    )
    if config.batch.token_budget == AUTO_TOKEN_BUDGET:
        config = _with_assumed_budget(config, facts, device_bytes, notes)
    estimate = estimate_run(config, facts) if device_bytes is None else check_fit(config, facts, device_bytes)
    return memory_table(replace(estimate, notes=(*estimate.notes, *notes)), device_bytes)


def _with_assumed_budget(
    config: Config, facts: RunFacts, device_bytes: float | None, notes: list[str]
) -> Config:
    longest = config.model.max_context or 2 * config.rollout.max_new_tokens
    if device_bytes is None:
        budget = max(longest, BatchSection().token_budget)
        notes.append(f"batch.token_budget: auto is taken for {budget:,} tokens, as no device is named")
    else:
        budget = automatic_budget(config, facts, device_bytes, longest)
        notes.append(
            f"batch.token_budget: auto begins with {budget:,} tokens, for samples of up to {longest:,}"
        )
    return with_budget(config, budget)


def _critic_shape(config: Config) -> MemoryShape | None:
    return read_shape(critic_model(config).path) if has_critic(config) else None


def _source_shapes(config: Config) -> dict[str, MemoryShape]:
    found = {name: read_shape(path) for name, path in source_model_paths(config).items()}
    return {name: shape for name, shape in found.items() if shape is not None}


def _element_bytes(config: Config, notes: list[str]) -> int:
    """Bytes per element of the working dtype, as far as the config says; see `model.dtype`."""
    dtype, device = config.model.dtype, config.cluster.device
    if dtype == "float32" or (dtype == "auto" and device == "cpu"):
        return 4
    if dtype == "auto" and device == "auto":
        notes.append(
            "taken to be an accelerator with bfloat16 weights (cluster.device and model.dtype: auto)"
        )
    return 2
