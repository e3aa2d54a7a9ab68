"""What follows from the settings of supervised fine-tuning, and the rules that hold only there."""

from typing import Literal

from paceline.config.errors import ConfigError
from paceline.config.presets import PRESETS
from paceline.config.schema import AlgorithmSection, Config

UNUSED_KEYS: dict[str, dict[str, str | None]] = {
    "run": {"num_steps": "sft.num_epochs or sft.max_steps", "save_samples_every": None},
    "task": {
        "answer_key": "sft.response_key",
        "eval_samples": None,
        "eval_temperature": None,
        "reward": None,
        "reward_workers": None,
        "reward_timeout_s": None,
        "overlong_prompts": "sft.overlong",
    },
    "reward": {"sources": None, "sequence_parallel_size": None},
    "batch": {
        "num_samples": "batch.num_prompts",
        "mini_batch_prompts": "batch.num_prompts",
        "num_epochs": "sft.num_epochs",
        "skip_zero_advantage": None,
    },
}
"""Settings of shared sections that say nothing about supervised updates, and what to use in their place. Sections
`algorithm`, `critic` and `UNUSED_SECTIONS` say nothing about them as a whole."""

UNUSED_SECTIONS = ("rollout", "reward", "agent")


def is_sft(config: Config) -> bool:
    """Whether the config is one of supervised fine-tuning."""
    return config.schedule.name == "sft"


def require_command(config: Config, command: Literal["train", "sft"]) -> None:
    """Raises `ConfigError` when the config is meant for the other command."""
    if is_sft(config) == (command == "sft"):
        return
    name = config.schedule.name
    other = "paceline sft" if is_sft(config) else "paceline train"
    raise ConfigError("schedule.name", name, f"is a schedule of `{other}`", "leave it out")


def sft_updates(config: Config, num_rows: int) -> int:
    """Optimiser updates that `num_rows` training rows make, the last one possibly on fewer rows than the others."""
    updates = -(-num_rows * config.sft.num_epochs // config.batch.num_prompts)
    return min(updates, config.sft.max_steps or updates)


def sft_ignores_no_setting(config: Config) -> ConfigError | None:
    """A setting that would have no effect is refused, unless it stands at its default."""
    if not is_sft(config):
        return None
    usual = AlgorithmSection(**PRESETS["grpo"]).model_dump(mode="json")
    algorithm = config.algorithm.model_dump(mode="json")
    found = {f"algorithm.{key}": value for key, value in algorithm.items() if value != usual[key]}
    sections = config.model_dump(mode="json", include=set(UNUSED_SECTIONS), exclude_defaults=True)
    found |= {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    for section, keys in UNUSED_KEYS.items():
        holder = config.model_dump(mode="json", include={section: set(keys)}, exclude_defaults=True)
        found |= {f"{section}.{key}": value for key, value in holder.get(section, {}).items()}
    problems = [
        ConfigError(name, value, "has no effect in `paceline sft`", _instead(name) or "leave it out")
        for name, value in found.items()
    ]
    return ConfigError.join(problems) if problems else None


def sft_settings_need_sft(config: Config) -> ConfigError | None:
    """The other way round: section `sft` means nothing to a run that samples."""
    changed = {} if is_sft(config) else config.sft.model_dump(mode="json", exclude_defaults=True)
    problems = [
        ConfigError(f"sft.{key}", value, "acts in `paceline sft` only, and this run samples", "leave it out")
        for key, value in changed.items()
    ]
    return ConfigError.join(problems) if problems else None


def _instead(name: str) -> str | None:
    section, _, key = name.partition(".")
    return UNUSED_KEYS.get(section, {}).get(key)


def warm_up_ends_in_sft(config: Config, num_updates: int) -> ConfigError | None:
    """As `rules.warm_up_ends`, once the rows are counted."""
    if config.train.warmup_steps <= num_updates:
        return None
    rule = f"must be at most the run's {num_updates} updates, or the learning rate never reaches train.lr"
    return ConfigError("train.warmup_steps", config.train.warmup_steps, rule, str(num_updates))


def describe_sft(config: Config, num_rows: int, num_held_out: int) -> str:
    """What `paceline sft --dry-run` prints: the arithmetic of a supervised run."""
    batch, sft, lora = config.batch, config.sft, config.lora
    updates = sft_updates(config, num_rows)
    adapters = (
        f"rank {lora.rank}, alpha {lora.scaled_alpha:g}" if lora.rank else "none, all weights are trained"
    )
    learned = min(updates * batch.num_prompts, num_rows * sft.num_epochs)
    every = config.run.eval_every
    evaluations = 2 + ((updates - 1) // every if every else 0) if num_held_out else 0
    rows = [
        ("run", f"{config.run.name} in {config.run.dir}, seed {config.run.seed}"),
        ("model", f"{config.model.path}, {config.model.dtype} on {config.cluster.device}"),
        ("adapters", adapters),
        ("rows from", str(config.task.name or config.task.path)),
        ("training rows", f"{num_rows:,} before over-long ones are dropped"),
        ("rows per update", f"{batch.num_prompts:,}"),
        ("epochs", f"{sft.num_epochs:,}"),
        ("updates in all", f"{updates:,} on {learned:,} rows"),
        ("longest row", "the model's context" if sft.max_length is None else f"{sft.max_length:,} tokens"),
        ("longer rows", sft.overlong),
        ("token budget", f"{batch.token_budget:,} tokens per micro-batch and device, {batch.layout} layout"),
        ("evaluation", f"{evaluations:,} times {num_held_out:,} held-out rows" if evaluations else "none"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
