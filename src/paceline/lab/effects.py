"""Whether an arm really differs from the baseline: not in a setting that does nothing in both, nor in one that the run
itself decides and that may come out the same."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel

from paceline.config import Config, ConfigError
from paceline.config.decisions import decide_old_logprob
from paceline.config.sft import is_sft
from paceline.lab.arms import Arm

AUTO = "auto"
MODES_CALLED_AUTO = frozenset({"rollout.speculation", "batch.token_budget"})
"""Where `auto` is a mode of its own, which no other value stands for: drafting while it pays, the largest budget that
fits."""
LEFT_TO_THE_RUN = {"cluster.num_threads": (0, "NUMBER")}
"""Other values that leave a choice to the run, and what to state in their place."""
ON_CUDA_ALONE = frozenset({"train.preset"})
SAMPLING_SECTIONS = ("rollout", "task", "reward", "agent")
"""Sections of which a replayed rollout uses nothing."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Settings that do nothing where `holds`, and why."""

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    reason: str


IDLE = (
    Idle(
        ("batch.share_prefixes",),
        lambda config: config.batch.layout == "padded",
        "the padded layout has a row for every sample",
    ),
    Idle(
        ("batch.skip_zero_advantage",),
        lambda config: (
            config.algorithm.entropy_coefficient > 0
            or (config.algorithm.kl_coefficient > 0 and config.algorithm.kl_placement == "loss")
        ),
        "with KL or entropy in the loss every sample has a gradient",
    ),
    Idle(
        ("train.param_offload",),
        lambda config: config.algorithm.kl_coefficient == 0 or config.lora.rank > 0,
        "there is no second copy of the weights: a reference takes algorithm.kl_coefficient above 0 and lora.rank 0",
    ),
    Idle(
        ("train.preset",),
        lambda config: config.cluster.device == "cpu",
        "it is the same on a CPU",
    ),
    Idle(
        ("train.reshard_after_forward", "train.forward_prefetch"),
        lambda config: config.cluster.num_devices == 1,
        "one device gathers no weights",
    ),
    Idle(
        ("train.activation_offload_min_kb",),
        lambda config: not config.train.activation_offload,
        "train.activation_offload is off",
    ),
    Idle(
        ("train.checkpoint_every",),
        lambda config: config.train.gradient_checkpointing != "every_k",
        "train.gradient_checkpointing is not every_k",
    ),
    Idle(
        ("train.selective_keep",),
        lambda config: config.train.gradient_checkpointing != "selective",
        "train.gradient_checkpointing is not selective",
    ),
    Idle(
        ("checkpoint.every",),
        lambda config: config.checkpoint.every > _num_steps(config),
        "no run of the ablation has so many steps (--steps)",
    ),
    Idle(
        ("checkpoint.asynchronous", "checkpoint.keep"),
        lambda config: (
            not config.checkpoint.save_final and not 0 < config.checkpoint.every <= _num_steps(config)
        ),
        "no step saves: set checkpoint.every to at most --steps",
    ),
    Idle(
        ("run.eval_every",),
        lambda config: config.run.eval_every >= _num_steps(config),
        "an evaluation after the last step is made anyway (--steps)",
    ),
)


def check_arm(arm: Arm, baseline: Config, config: Config, *, replays: bool) -> None:
    """Raises `ConfigError` where `arm`, whose settings make `config` of the recipe, may be the baseline under another
    name."""
    mine, other = _settings(config), _settings(baseline)
    changed = [key for key in mine if mine[key] != other[key]]
    if not changed:
        rule = "changes nothing: the recipe has these settings already; put their opposite into the baseline"
        raise ConfigError("--features", arm.name, rule, _opposites(arm))
    if replays and all(key.split(".")[0] in SAMPLING_SECTIONS for key in changed):
        rule = f"changes nothing: {', '.join(changed)} acts on sampling, which --rollouts replay leaves out"
        raise ConfigError("--features", arm.name, rule, "--rollouts sample")
    acting = [key for key in changed if _in_force(config, key, mine) != _in_force(baseline, key, other)]
    if not acting:
        reasons = dict.fromkeys(_why_the_same(config, key) for key in changed)
        rule = (
            f"changes nothing that acts: {', '.join(changed)} does nothing here, because {'; '.join(reasons)}"
        )
        raise ConfigError("--features", arm.name, rule)
    for key in acting:
        _refuse_open_choice(arm, key, (baseline, other[key], mine[key]), "the baseline")
        _refuse_open_choice(arm, key, (config, mine[key], other[key]), "the feature")
    if config.cluster.device == AUTO and ON_CUDA_ALONE.issuperset(acting):
        rule = (
            f"changes nothing on a CPU, and cluster.device is {AUTO} in the baseline, which the run decides"
        )
        raise ConfigError("--features", arm.name, rule, "cluster.device=cuda in the baseline")


def _num_steps(config: Config) -> int:
    return (config.sft.max_steps or 0) if is_sft(config) else config.run.num_steps


def _settings(config: Config) -> dict[str, Any]:
    """Every setting by its whole dotted name."""
    return dict(_leaves("", config))


def _leaves(prefix: str, section: BaseModel) -> Iterable[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _in_force(config: Config, key: str, settings: Mapping[str, Any]) -> Any:
    """What a setting comes to by the others alone; None where it does nothing."""
    if key == "algorithm.old_logprob":
        return decide_old_logprob(config).source
    return None if _idle(config, key) is not None else settings[key] or None


def _idle(config: Config, key: str) -> Idle | None:
    return next((idle for idle in IDLE if key in idle.keys and idle.holds(config)), None)


def _why_the_same(config: Config, key: str) -> str:
    if key == "algorithm.old_logprob":
        decision = decide_old_logprob(config)
        return f"the old log-probs are {decision.source} either way ({decision.reason})"
    idle = _idle(config, key)
    return idle.reason if idle is not None else "both values mean the same"


def _refuse_open_choice(arm: Arm, key: str, side: tuple[Config, Any, Any], name: str) -> None:
    """Refuses a setting that one side leaves to the run: what the run decides may be what the other side has. `side`:
    its config, its value, the other side's."""
    config, value, across = side
    open_value, wanted = LEFT_TO_THE_RUN.get(key, (AUTO, ""))
    if value != open_value or key in MODES_CALLED_AUTO or _idle(config, key) is not None:
        return
    if key == "algorithm.old_logprob":  # follows from the settings, and has been compared
        return
    choices = wanted or " or ".join(_text(one) for one in _choices(key) if one not in (AUTO, across))
    rule = (
        f"may compare a setting with itself: {key} is {_text(value)} in {name}, so that the run decides, "
        f"and may decide for {_text(across)}"
    )
    raise ConfigError("--features", arm.name, rule, f"{key}={choices or 'VALUE'} in {name}")


def _opposites(arm: Arm) -> str | None:
    """Settings of a baseline that an arm would differ from, where there is one value to name or a few."""
    named = [
        f"{key}={' or '.join(others)}"
        for key, value in arm.keys.items()
        if (others := [_text(one) for one in _choices(key) if one not in (AUTO, value)])
    ]
    return ", ".join(named) or None


def _choices(key: str) -> tuple[Any, ...]:
    """The values of a setting that has few."""
    section: type[BaseModel] = Config
    *sections, name = key.split(".")
    for part in sections:
        found = section.model_fields[part].annotation
        assert isinstance(found, type) and issubclass(found, BaseModel)
        section = found
    kind = section.model_fields[name].annotation
    if kind is bool:
        return (True, False)
    values = [one for part in (kind, *get_args(kind)) for one in _literal(part)]
    return tuple(dict.fromkeys(values))


def _literal(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if getattr(kind, "__origin__", None) is Literal else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
